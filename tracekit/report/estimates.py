"""How a mean over sequences is written beside its interval and n: in a sentence, and in a cell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit.measure.stats import MIN_SEQUENCES, Interval
from tracekit.report.formats import NOTHING, number, percent
from tracekit.report.tables import Cell

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.report.load import Point


def short(value: float) -> str:
    """Return a number with two significant digits: what an interval supports."""
    return number(value, 2)


def bare(frac: float) -> str:
    """Return a fraction as a percentage whose sign stands in the heading of its column."""
    return percent(frac).removesuffix("\u00a0%")


def signed(frac: float) -> str:
    """Return a change in per cent with its sign, its unit in the heading of its column."""
    return ("\u2212" if frac < 0 else "+") + bare(abs(frac))


def cell(text: str, key: float = math.nan) -> Cell:
    """Return a cell whose text may break over lines, and that sorts by a number."""
    return Cell(text, "" if math.isnan(key) else f"{key:.9g}", is_number=False)


def span(low: float, high: float, write: Callable[[float], str]) -> str:
    """Return two ends for a column of intervals: ``0.02 to 0.05``; 'n/a' for null."""
    return NOTHING if math.isnan(low) else f"{write(low)} to\u00a0{write(high)}"


def ends(found: Point | Interval, write: Callable[[float], str]) -> str:
    """Return an interval for a column of its own; 'n/a' where there is none."""
    return span(*_ends(found), write)


def between(
    point: Point | Interval, write: Callable[[float], str], *, space: str = "\u00a0"
) -> str:
    """Return an interval and its n: ``[0.02, 0.05], n = 3``; without one, why there is none."""
    low, high = _ends(point)
    if math.isnan(low):
        return f"(no interval below {MIN_SEQUENCES} sequences, n\u00a0=\u00a0{point.n})"
    return f"[{write(low)},{space}{write(high)}], n\u00a0=\u00a0{point.n}"


def compact(point: Point | None, write: Callable[[float], str]) -> str:
    """Return a point for a cell of a table: ``0.031 [0.02, 0.05] n=3``, breaking at the spaces."""
    if point is None:
        return NOTHING
    ends = "" if math.isnan(point.low) else f" [{write(point.low)},\u00a0{write(point.high)}]"
    return f"{write(point.mean)}{ends} n={point.n}"


def _ends(found: Point | Interval) -> tuple[float, float]:
    low, high = found.low, found.high
    return (math.nan, math.nan) if low is None or high is None else (low, high)
