"""Seeds of single sequences."""

from __future__ import annotations

import uuid


def sequence_seed(seed: int, sequence_id: str) -> int:
    """Return the seed of one sequence: independent of what was recorded before it."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{seed}/{sequence_id}").int % 2**62
