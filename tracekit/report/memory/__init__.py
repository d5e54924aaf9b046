"""What policies hold of the cache, in bytes: as measured, and carried on to longer requests."""
