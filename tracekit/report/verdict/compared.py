"""Policies beside each other: at one asked fraction, by domain, and paired by sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.measure.stats import paired_difference
from tracekit.report.verdict.yardstick import evicts

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from tracekit.measure.stats import Interval
    from tracekit.report.load import Point, Results
    from tracekit.report.verdict.yardstick import Yardstick


def nearest_asked(points: Iterable[Point], wanted: float) -> Point:
    """Return the point whose asked fraction is nearest ``wanted``; of two the smaller, then by x.

    Parameters
    ----------
    points
        At least one.
    wanted
        Kept fraction asked for.
    """
    return min(points, key=lambda one: (abs(one.asked - wanted), one.asked, one.x))


def prompt_of(sequence_id: pd.Series[str]) -> pd.Series[str]:
    """Return the prompt, or text, of which each sequence is a sample, or a window."""
    return sequence_id.str.rsplit("#", n=1).str[0]


def nearest(curve: Iterable[Point], wanted: float) -> Point | None:
    """Return the evicting point whose asked fraction is nearest; the smaller of two; None if none.

    Parameters
    ----------
    curve
        Points of one policy.
    wanted
        Kept fraction asked for.
    """
    able = [point for point in curve if evicts(point)]
    return nearest_asked(able, wanted) if able else None


def at_fraction(results: Results, yardstick: Yardstick, wanted: float) -> dict[str, Point]:
    """Return of each policy that a decoder can run the evicting point nearest an asked fraction."""
    curves = results.methods("kv", yardstick.measure, level=yardstick.level)
    found = {family: nearest(curve, wanted) for family, curve in curves.items()}
    return {family: point for family, point in found.items() if point is not None}


def prompts(results: Results, level: str) -> dict[str, int]:
    """Return how many prompts of each domain have results at a level; samples of one count once."""
    rows = results.whole
    rows = rows[rows["level"] == level]
    counts = prompt_of(rows["sequence_id"]).groupby(rows["domain"]).nunique()
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
