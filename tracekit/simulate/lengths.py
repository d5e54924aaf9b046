"""Length buckets of sequences."""

from __future__ import annotations

_ENDS = ((256, "< 256"), (1024, "256 - 1k"), (4096, "1k - 4k"), (16384, "4k - 16k"))
_LAST = ">= 16k"

LENGTHS = (*(name for _, name in _ENDS), _LAST)
"""Names of the length buckets, shortest first; ends in tokens, exclusive."""


def length_bucket(num_tokens: int) -> str:
    """Return the name of the length bucket of a sequence."""
    return next((name for end, name in _ENDS if num_tokens < end), _LAST)
