"""Selectors, one a file; each registers itself."""
