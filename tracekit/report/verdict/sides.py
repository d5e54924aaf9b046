"""On which side of a threshold an interval lies: the one rule of the claims and of the diagnosis.

What is said is supported if the interval lies wholly on its side of the threshold, refuted if wholly
on the other side, and cannot be told otherwise: an interval across the threshold shows nothing, not
even that there is no difference. "As good as" therefore needs a margin, stated, as its threshold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_above(low: float | None, high: float | None, threshold: float = 0.0) -> bool | None:
    """Return whether an interval lies above a threshold; None if across it, or without ends.

    Parameters
    ----------
    low, high
        Ends of the interval; None or NaN where there are too few sequences for one.
    threshold
        In the same unit.
    """
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return None
    return True if low > threshold else False if high < threshold else None


def is_below(low: float | None, high: float | None, threshold: float = 0.0) -> bool | None:
    """Return whether an interval lies below a threshold; None if across it, or without ends."""
    found = is_above(low, high, threshold)
    return None if found is None else not found


def all_of(sides: Iterable[bool | None]) -> bool | None:
    """Return what holds of everything: True or False if all say so; None if they differ."""
    found = set(sides)
    return found.pop() if len(found) == 1 else None


def any_of(sides: Iterable[bool | None]) -> bool | None:
    """Return whether it holds of one at least: False if it is refuted of all, None if not known."""
    found = set(sides)
    return True if True in found else all_of(found)
