"""Transforms, one a file; each registers itself."""
