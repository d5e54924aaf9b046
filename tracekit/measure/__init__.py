"""Pure functions from arrays to numbers: logits, attention, divergences, statistics."""
