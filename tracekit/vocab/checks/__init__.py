"""Checks, one file each; adding one is adding a file."""
