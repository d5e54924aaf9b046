"""Budgets, one a file; each registers itself and the presets that it serves."""
