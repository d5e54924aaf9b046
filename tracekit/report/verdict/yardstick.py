"""What each level of truth is judged by: its measure, its bound, and how many prompts it takes.

A policy *passes* at a measured kept fraction if the upper end of its 95 % interval there is below
the bound of the level, on ``DOMAIN_PROMPTS`` prompts or more: below that the ends of a bootstrap
interval say less than they seem to (of 3 prompts, 61 % of the upper ends hold where 97.5 % should).
Levels are judged one by one, nothing is interpolated, and what looks at later rows (a bound) is
never judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.estimates import between, short
from tracekit.report.formats import percent
from tracekit.report.load import KEY_MEASURES
from tracekit.report.verdict.prompts import most_prompts

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

ERROR_BOUND = 0.10
"""Relative error of a layer's attention output, level local, above which a policy fails."""

DOMAIN_PROMPTS = 8
"""Prompts, of a domain or of all, below which there is no verdict."""

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

    def judges(self, point: Point) -> bool:
        """Return whether a point has prompts enough for a verdict."""
        return point.n >= DOMAIN_PROMPTS

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
    """Return the highest level that can judge; None without policies.

    It is the highest with ``DOMAIN_PROMPTS`` prompts; where there is none, the highest with an
    interval, else the lowest: they have leads, no verdicts.
    """
    found = yardsticks(results, options)
    have = {one: most_prompts(results, one.level) for one in found}
    for needed in (DOMAIN_PROMPTS, MIN_SEQUENCES):
        for one in found:
            if have[one] >= needed:
                return one
    return found[-1] if found else None
