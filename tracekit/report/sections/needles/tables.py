"""Tables of what policies hold of the needles: a row a policy, or a row a policy and needle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tracekit.report.formats import count, evidence, percent, percent_range
from tracekit.report.tables import INTERVAL, Column, HtmlTable, build, text_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.stats import Interval
    from tracekit.report.figures.needle_map import Needle

_POLICY_COLUMNS = (
    text_column("policy"),
    Column("kept fraction", percent),
    Column("removed", percent),
    Column("needle held", percent),
    INTERVAL,
    Column("least", percent),
    Column("n", count),
    Column("left out", count),
    Column("flagged", count),
)


@dataclass(frozen=True)
class Held:
    """What a policy holds of all needles.

    Parameters
    ----------
    needles
        One at least.
    held
        Mean share held over the needles.
    num_idle
        Needles on whose text it evicts nothing: left out.
    """

    needles: tuple[Needle, ...]
    held: Interval
    num_idle: int

    @property
    def family(self) -> str:
        """Its short name."""
        return self.needles[0].family

    @property
    def is_bound(self) -> bool:
        """Whether it looks ahead."""
        return self.needles[0].is_bound

    @property
    def kept_frac(self) -> float:
        """Its measured kept fraction, mean."""
        return fmean(one.kept_frac for one in self.needles)

    @property
    def mean(self) -> float:
        """Mean share held."""
        return fmean(one.held_frac for one in self.needles)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; NaN below three sequences."""
        low, high = self.held.low, self.held.high
        return (math.nan, math.nan) if low is None or high is None else (low, high)

    @property
    def text(self) -> str:
        """What it holds, how sure that is, and at which kept fraction."""
        sure = evidence(*self.ends, self.held.n)
        return f"{percent(self.mean)} ({sure}, at {percent(self.kept_frac)} kept)"


def policy_table(
    policies: Sequence[Held], idle: Sequence[str], wanted_frac: float, seed: int
) -> HtmlTable:
    """Return a row a policy.

    Parameters
    ----------
    policies
        In the order of the rows.
    idle
        Families that evict nothing on any of the texts, for the caption.
    wanted_frac
        Kept fraction near which the policies were chosen.
    seed
        Of the intervals.
    """
    listed = f". These evict nothing on any of the texts: {', '.join(idle)}" if idle else ""
    return build(
        "table-needles",
        "Level local: share of the needle's entries that is held, mean over layers, KV heads and "
        f"scored rows, then over needles, with 95\u00a0% bootstrap intervals (seed {seed}); each "
        f"policy at its measured kept fraction nearest {percent(wanted_frac)}. Least: of one needle. "
        "Left out: needles on whose text nothing was evicted. Flagged: the budget was smaller than "
        "what was to be protected (clipped), or larger than the cache (clamped). A bound looks "
        f"ahead: no decoder has it{listed}",
        _POLICY_COLUMNS,
        map(_row, policies),
    )


def _row(one: Held) -> tuple[Any, ...]:
    return (
        f"{one.family} (bound)" if one.is_bound else one.family,
        one.kept_frac,
        1 - one.kept_frac,
        one.mean,
        percent_range(*one.ends),
        min(needle.held_frac for needle in one.needles),
        one.held.n,
        one.num_idle,
        sum(bool(needle.flags) for needle in one.needles),
    )


def needle_list(needles: Sequence[Needle]) -> HtmlTable:
    """Return a row a policy and needle."""
    columns = (
        text_column("policy"),
        text_column("sequence"),
        Column("depth", percent),
        Column("length (tokens)", count),
        Column("kept fraction", percent),
        Column("needle held", percent),
        text_column("flags"),
    )
    rows = [
        (
            one.family,
            one.sequence_id,
            one.depth_frac,
            one.length_tokens,
            one.kept_frac,
            one.held_frac,
            one.flags or "none",
        )
        for one in needles
    ]
    return build(
        "table-needle-list",
        "Level local: each needle under each policy. Depth: where the needle begins, over the "
        "length of the text that it lies in",
        columns,
        rows,
    )
