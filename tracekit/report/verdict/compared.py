"""Policies beside each other: at one asked fraction, by domain, and paired by prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.measure.stats import paired_difference
from tracekit.report.verdict.prompts import by_prompt, over_prompts, prompts
from tracekit.report.verdict.yardstick import evicts

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    return {
        family: over_prompts(results, point) for family, point in found.items() if point is not None
    }


def in_domains(results: Results, yardstick: Yardstick, wanted: Point) -> dict[str, Point]:
    """Return the same policy at the same fraction in each domain that has it, sorted."""
    found: dict[str, Point] = {}
    for domain in sorted(prompts(results, yardstick.level)):
        curves = results.methods("kv", yardstick.measure, level=yardstick.level, domain=domain)
        same = (point for point in curves.get(wanted.family, []) if point.name == wanted.name)
        found.update((domain, over_prompts(results, point, domain=domain)) for point in same)
    return found


def least_loss(results: Results, yardstick: Yardstick, wanted: float) -> Point | None:
    """Return the policy of ``at_fraction`` that loses least in the mean; None without one."""
    points = at_fraction(results, yardstick, wanted).values()
    return min(points, key=lambda point: (point.mean, point.family), default=None)


def difference(results: Results, yardstick: Yardstick, one: Point, other: Point) -> Interval:
    """Return the loss of a policy less that of another, on the prompts that both have."""
    values, others = (
        by_prompt(results, yardstick.level, yardstick.measure, point.name) for point in (one, other)
    )
    common = values.index.intersection(others.index)
    return paired_difference(
        values.loc[common].to_numpy(), others.loc[common].to_numpy(), seed=results.run["seed"]
    )
