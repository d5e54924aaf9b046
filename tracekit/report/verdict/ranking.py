"""Which policies pass, from which kept fraction on, and where nothing passes any more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.report.verdict.prompts import over_prompts
from tracekit.report.verdict.yardstick import evicts
from tracekit.schema import ANY

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
        All that were measured.
    passed
        Of each policy that passes its smallest fraction, ascending.
    failed
        Of each other its largest measured fraction, least loss first.
    unjudged
        Of each policy with too few prompts at every fraction the largest one.
    lead
        What is worth a look before there is a verdict: the smallest fraction at which a policy would
        pass if there were prompts enough, else the point that loses least; None without points.
    broken
        Of the judged points at or below the largest fraction at which nothing passes, the one with
        the least loss; None where the smallest measured fraction has one that passes.
    broken_frac
        That largest fraction; NaN without one.
    """

    yardstick: Yardstick
    points: tuple[Point, ...]
    passed: tuple[Point, ...]
    failed: tuple[Point, ...]
    unjudged: tuple[Point, ...]
    lead: Point | None
    broken: Point | None
    broken_frac: float

    @property
    def is_thin(self) -> bool:
        """Whether no point has prompts enough, so that nothing can be judged."""
        return not self.passed and not self.failed

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
    points = [point for curve in curves.values() for point in curve]
    enough = {family: list(filter(yardstick.judges, curve)) for family, curve in curves.items()}
    judged = {family: curve for family, curve in enough.items() if curve}
    best = {family: smallest(curve, yardstick.passes) for family, curve in judged.items()}
    passed = sorted(filter(None, best.values()), key=lambda point: (point.x, point.family))
    failed = sorted(
        (judged[family][-1] for family, point in best.items() if point is None), key=_by_loss
    )
    counted = [point for curve in judged.values() for point in curve]
    least = min((point.x for point in counted if yardstick.passes(point)), default=math.inf)
    below = [point for point in counted if point.x < least]
    return Ranking(
        yardstick=yardstick,
        points=tuple(points),
        passed=tuple(passed),
        failed=tuple(failed),
        unjudged=tuple(curve[-1] for family, curve in curves.items() if family not in judged),
        lead=_lead(curves, yardstick),
        broken=min(below, key=_by_loss, default=None),
        broken_frac=max((point.x for point in below), default=math.nan),
    )


def _by_loss(point: Point) -> tuple[float, str]:
    return point.mean, point.family


def _lead(curves: Mapping[str, Sequence[Point]], yardstick: Yardstick) -> Point | None:
    """Return the smallest point that would pass if there were prompts enough, else the least loss."""
    able = filter(None, (smallest(curve, yardstick.passes) for curve in curves.values()))
    found = min(able, key=lambda point: (point.x, point.family), default=None)
    points = (point for curve in curves.values() for point in curve)
    return found or min(points, key=_by_loss, default=None)


def ranking(
    results: Results, yardstick: Yardstick, *, domain: str = ANY, x_name: str = "kept_frac"
) -> Ranking:
    """Return ``rank`` of what a decoder can run: over all, in a ``domain``, by another ``x_name``."""
    curves = results.methods(
        "kv", yardstick.measure, level=yardstick.level, domain=domain, x_name=x_name
    )
    over = {
        family: [over_prompts(results, point, domain=domain) for point in curve]
        for family, curve in curves.items()
    }
    return rank(over, yardstick)
