"""Buckets of scored rows: all of them, and by steps after the eviction point."""

from __future__ import annotations

from dataclasses import dataclass

from tracekit import schema

STEP_ENDS = (16, 64, 256, 1024, 4096)
"""Last steps after the eviction point of the step buckets; the last bucket is open."""


@dataclass(frozen=True)
class Steps:
    """Some scored rows: the name of their bucket, the first of them and the last + 1."""

    name: str
    start: int
    end: int

    @property
    def rows(self) -> slice:
        """Of an axis of scored rows."""
        return slice(self.start, self.end)


def step_buckets(distance: int, num_rows: int) -> list[Steps]:
    """Return all scored rows, then those of each bucket of steps after the eviction point.

    Parameters
    ----------
    distance
        Steps between the eviction point and the first scored row.
    num_rows
        Scored rows.
    """
    buckets = [Steps(schema.ANY, 0, num_rows)]
    low = 0
    for high in (*STEP_ENDS, distance + num_rows):
        start, end = max(low - distance, 0), min(high - distance, num_rows)
        if start < end:
            name = f"{low + 1}-{high}" if high in STEP_ENDS else f">{low}"
            buckets.append(Steps(name, start, end))
        low = max(low, high)
    return buckets
