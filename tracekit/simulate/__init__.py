"""Replay a trace under policies and estimators: trace -> results, cell by cell, resumable."""
