"""The rules by which a report judges policies: which level, which bound, over how many prompts.

A policy *passes* at a measured kept fraction if the upper end of its 95 % interval there is below
the bound of the level. Levels are judged one by one, nothing is interpolated, and what looks at
later rows (a bound) is never judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.measure.stats import MIN_SEQUENCES, paired_difference
from tracekit.report.estimates import between, short
from tracekit.report.formats import percent
from tracekit.report.load import KEY_MEASURES, Point, Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from tracekit.measure.stats import Interval
    from tracekit.report.options import Options

ERROR_BOUND = 0.10
"""Relative error of a layer's attention output, level local, above which a policy fails."""

LEVEL_SEQUENCES = MIN_SEQUENCES
"""Sequences below which a level gives no verdict: they have no interval."""

DOMAIN_PROMPTS = 8
"""Prompts of a domain below which nothing is judged by domain."""

KEPT_TOLERANCE = 0.02
"""Kept fractions that differ by less are compared as the same."""

CHANCE, RECENCY = "random", "streaming"
"""Policies that any score must beat: evicting at random, and keeping sinks and the newest."""

_JUDGED = ("propagated", "predicted", "local")
"""Levels that judge, the highest first."""

_NAMES = {"local": "output error", "predicted": "predicted KL", "propagated": "KL"}


@dataclass(frozen=True)
class Yardstick:
    """What a level is judged by: its measure, and the bound below which a policy passes."""

    level: str
    bound: float

    @property
    def measure(self) -> str:
        """Column of the results."""
        return KEY_MEASURES[self.level]

    @property
    def name(self) -> str:
        """What readers call the measure."""
        return _NAMES[self.level]

    @property
    def unit(self) -> str:
        """Its unit, with a space before; empty for a share."""
        return "" if self.level == "local" else "\u00a0nats a token"

    def write(self, value: float) -> str:
        """Return a value without its unit."""
        return percent(value) if self.level == "local" else short(value)

    def passes(self, point: Point) -> bool:
        """Return whether the upper end of the interval is below the bound; never without one."""
        return point.high < self.bound

    def told(self, point: Point) -> str:
        """Return the evidence of one point: ``KL 0.031 nats a token [0.02, 0.05], n = 3``."""
        return f"{self.name} {self.write(point.mean)}{self.unit} {between(point, self.write)}"


@dataclass(frozen=True)
class Ranking:
    """Policies that pass, and those that do not, at one level.

    Parameters
    ----------
    yardstick
        What they were judged by.
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
    passed: tuple[Point, ...]
    failed: tuple[Point, ...]
    broken: Point | None
    broken_frac: float

    def of(self, family: str) -> Point | None:
        """Return the smallest passing point of a policy; None if it has none."""
        return next((point for point in self.passed if point.family == family), None)

    @property
    def evicting(self) -> Point | None:
        """The first of the passing policies that evict; transforms alone store all entries."""
        return next((point for point in self.passed if evicts(point)), None)


def evicts(point: Point) -> bool:
    """Return whether a policy was asked to keep less than all entries."""
    return not point.target >= 1


def yardsticks(results: Results, options: Options) -> tuple[Yardstick, ...]:
    """Return what each level that has results is judged by, the highest level first."""
    return tuple(
        Yardstick(level, ERROR_BOUND if level == "local" else options.kl_bound_nats)
        for level in _JUDGED
        if level in results.levels
    )


def judging(results: Results, options: Options) -> Yardstick | None:
    """Return the highest level with enough sequences, else the lowest; None without policies."""
    found = yardsticks(results, options)
    able = (one for one in found if _most_sequences(results, one) >= LEVEL_SEQUENCES)
    return next(able, found[-1] if found else None)


def _most_sequences(results: Results, yardstick: Yardstick) -> int:
    curves = results.methods("kv", yardstick.measure, level=yardstick.level)
    return max((point.n for curve in curves.values() for point in curve), default=0)


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
        passed=tuple(passed),
        failed=tuple(failed),
        broken=min(below, key=lambda point: (point.mean, point.family), default=None),
        broken_frac=max((point.x for point in below), default=math.nan),
    )


def ranking(results: Results, yardstick: Yardstick, **part: str) -> Ranking:
    """Return ``rank`` of the policies that a decoder can run, over all or a ``domain``."""
    curves = results.methods("kv", yardstick.measure, level=yardstick.level, **part)
    return rank(curves, yardstick)


def nearest(curve: Iterable[Point], wanted: float) -> Point | None:
    """Return the evicting point whose asked fraction is nearest; the smaller of two; None if none.

    Parameters
    ----------
    curve
        Points of one policy.
    wanted
        Kept fraction asked for.
    """
    able = (point for point in curve if evicts(point))
    return min(able, key=lambda point: (abs(point.asked - wanted), point.asked), default=None)


def at_fraction(results: Results, yardstick: Yardstick, wanted: float) -> dict[str, Point]:
    """Return of each policy that a decoder can run the evicting point nearest an asked fraction."""
    curves = results.methods("kv", yardstick.measure, level=yardstick.level)
    found = {family: nearest(curve, wanted) for family, curve in curves.items()}
    return {family: point for family, point in found.items() if point is not None}


def prompts(results: Results, level: str) -> dict[str, int]:
    """Return how many prompts of each domain have results at a level; samples of one count once."""
    rows = results.whole
    rows = rows[rows["level"] == level]
    prompt = rows["sequence_id"].str.rsplit("#", n=1).str[0]
    counts = prompt.groupby(rows["domain"]).nunique()
    return {str(domain): int(number_of) for domain, number_of in counts.items()}


def in_domains(results: Results, yardstick: Yardstick, wanted: Point) -> dict[str, Point]:
    """Return the same policy at the same fraction in each domain that has it, sorted."""
    found: dict[str, Point] = {}
    for domain in sorted(prompts(results, yardstick.level)):
        curves = results.methods("kv", yardstick.measure, level=yardstick.level, domain=domain)
        same = (point for point in curves.get(wanted.family, []) if point.name == wanted.name)
        found.update((domain, point) for point in same)
    return found


def least_loss(results: Results, yardstick: Yardstick, wanted: float) -> Point | None:
    """Return the policy of ``at_fraction`` that loses least in the mean; None without one."""
    points = at_fraction(results, yardstick, wanted).values()
    return min(points, key=lambda point: (point.mean, point.family), default=None)


def by_sequence(results: Results, level: str, measure: str, policy: str) -> pd.Series[float]:
    """Return one measure of a policy on each sequence where it evicted something."""
    rows = results.whole
    of_policy = (rows["level"] == level) & (rows["policy"] == policy) & ~rows["is_idle"].eq(True)
    found: pd.Series[float] = rows[of_policy].set_index("sequence_id")[measure].astype(float)
    return found.sort_index()


def difference(results: Results, yardstick: Yardstick, one: Point, other: Point) -> Interval:
    """Return the loss of a policy less that of another, on the sequences that both have."""
    values = by_sequence(results, yardstick.level, yardstick.measure, one.name)
    others = by_sequence(results, yardstick.level, yardstick.measure, other.name)
    common = values.index.intersection(others.index)
    return paired_difference(
        values.loc[common].to_numpy(), others.loc[common].to_numpy(), seed=results.run["seed"]
    )
