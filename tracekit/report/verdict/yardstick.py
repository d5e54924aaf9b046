"""What each level of truth is judged by: its measure, its bound, and how many prompts it takes.

A policy *passes* at a measured kept fraction if the upper end of its 95 % interval there is below
the bound of the level. Levels are judged one by one, nothing is interpolated, and what looks at
later rows (a bound) is never judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.estimates import between, short
from tracekit.report.formats import percent
from tracekit.report.load import KEY_MEASURES

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

ERROR_BOUND = 0.10
"""Relative error of a layer's attention output, level local, above which a policy fails."""

DOMAIN_PROMPTS = 8
"""Prompts of a domain below which nothing is judged, or compared, by domain."""

COMPARED_FRAC = 0.50
"""Kept fraction asked for at which policies, lengths and domains are compared."""

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
    able = (one for one in found if _most_sequences(results, one) >= MIN_SEQUENCES)
    return next(able, found[-1] if found else None)


def _most_sequences(results: Results, yardstick: Yardstick) -> int:
    """Return the most sequences of a policy, of those that evict and those that recall."""
    curves = [
        curve
        for x_name in ("kept_frac", "read_frac")
        for curve in results.methods(
            "kv", yardstick.measure, level=yardstick.level, x_name=x_name
        ).values()
    ]
    return max((point.n for curve in curves for point in curve), default=0)
