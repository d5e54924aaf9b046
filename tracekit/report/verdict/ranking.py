"""Which policies pass, from which kept fraction on, and where nothing passes any more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.verdict.yardstick import evicts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracekit.report.load import Point, Results
    from tracekit.report.verdict.yardstick import Yardstick


@dataclass(frozen=True)
class Ranking:
    """Policies that pass, and those that do not, at one level.

    Parameters
    ----------
    yardstick
        What they were judged by.
    points
        All that were judged.
    passed
        Of each policy that passes its smallest fraction, ascending.
    failed
        Of each other its largest measured fraction, least loss first.
    broken
        Of the points at or below the largest measured fraction at which nothing passes, the one
        with the least loss; None where the smallest measured fraction has one that passes.
    broken_frac
        That largest fraction; NaN without one.
    """

    yardstick: Yardstick
    points: tuple[Point, ...]
    passed: tuple[Point, ...]
    failed: tuple[Point, ...]
    broken: Point | None
    broken_frac: float

    @property
    def is_thin(self) -> bool:
        """Whether no point has sequences enough for an interval, so that nothing can pass."""
        return all(point.n < MIN_SEQUENCES for point in self.points)

    def of(self, family: str) -> Point | None:
        """Return the smallest passing point of a policy; None if it has none."""
        return next((point for point in self.passed if point.family == family), None)

    @property
    def evicting(self) -> Point | None:
        """The first of the passing policies that evict; transforms alone store all entries."""
        return next((point for point in self.passed if evicts(point)), None)


def smallest(curve: Sequence[Point], passes: Callable[[Point], bool]) -> Point | None:
    """Return the point of smallest x from which on all points of a curve pass; None if none does.

    Parameters
    ----------
    curve
        Ascending x.
    passes
        The rule.
    """
    found = None
    for point in reversed(curve):
        if not passes(point):
            break
        found = point
    return found


def rank(curves: Mapping[str, Sequence[Point]], yardstick: Yardstick) -> Ranking:
    """Return which policies pass at which fraction.

    Parameters
    ----------
    curves
        Points of one level by policy, ascending x; bounds left out.
    yardstick
        The rule.
    """
    best = {family: smallest(curve, yardstick.passes) for family, curve in curves.items()}
    passed = sorted(
        (point for point in best.values() if point), key=lambda point: (point.x, point.family)
    )
    failed = sorted(
        (curves[family][-1] for family, point in best.items() if point is None),
        key=lambda point: (point.mean, point.family),
    )
    points = [point for curve in curves.values() for point in curve]
    least = min((point.x for point in points if yardstick.passes(point)), default=math.inf)
    below = [point for point in points if point.x < least]
    return Ranking(
        yardstick=yardstick,
        points=tuple(points),
        passed=tuple(passed),
        failed=tuple(failed),
        broken=min(below, key=lambda point: (point.mean, point.family), default=None),
        broken_frac=max((point.x for point in below), default=math.nan),
    )


def ranking(results: Results, yardstick: Yardstick, **part: str) -> Ranking:
    """Return ``rank`` of what a decoder can run: over all, in a ``domain``, by another ``x_name``."""
    curves = results.methods("kv", yardstick.measure, level=yardstick.level, **part)
    return rank(curves, yardstick)
