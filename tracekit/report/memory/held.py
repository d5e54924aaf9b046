"""What policies hold of the cache; those that hold the same are one line of a figure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tracekit.measure.memory import CachePlan, CacheShape
from tracekit.report.verdict.compared import nearest_asked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracekit.report.load import Point, Results
    from tracekit.spec import ModelSpec

WANTED = 0.25
"""Kept fraction whose nearest point of each policy is drawn."""

MOST_GROUPS = 6
_DEFAULT_TOKENS = 32_768
"""Longest context planned for where a model's positions have no end."""

_BUDGET = re.compile(r"\bkept=(\d+)tok\b")
_REPEATS = "every="


@dataclass(frozen=True, kw_only=True)
class Held:
    """Policies that hold the same part of the cache: memory is a matter of schedule, not of score.

    Parameters
    ----------
    points
        Kept fraction as measured, one a policy, sorted by name.
    repeats
        Whether they evict again and again, so that their fraction holds at any length; policies that
        act once keep all later tokens.
    num_budget_tokens
        Tokens that they keep, where the budget is no fraction.
    peak_frac
        Peak bytes of the first policy over peak bytes of the full cache, mean; NaN if unknown.
    """

    points: tuple[Point, ...]
    repeats: bool
    num_budget_tokens: int | None
    peak_frac: float

    @property
    def families(self) -> tuple[str, ...]:
        """Short names of the policies."""
        return tuple(point.family for point in self.points)

    @property
    def first(self) -> Point:
        """The point that stands for all."""
        return self.points[0]

    @property
    def name(self) -> str:
        """Label of the line."""
        more = len(self.points) - 1
        return self.first.family + (f" and {more} more" if more else "")

    def bytes_T(self, full: CachePlan, tokens_T: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the bytes of one request after so many tokens, float64 [T], as the fraction says."""
        if self.num_budget_tokens is not None:
            return full.bytes_T(np.minimum(tokens_T, self.num_budget_tokens))
        return full.bytes_T(tokens_T) * self.first.mean

    def request_bytes(self, full: CachePlan, num_tokens: int) -> float:
        """Return the bytes of one request of so many tokens, as the fraction says."""
        return float(self.bytes_T(full, np.array([num_tokens]))[0])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a report tells of memory.

    Parameters
    ----------
    level
        Of all measurements: what is held is the same at all levels, this one has the most sequences.
    full
        The full cache of one request.
    groups
        Causal policies at the fraction nearest ``WANTED``, those that hold least first.
    left_out
        Names of the policies of further groups, which are not drawn.
    longest_tokens
        Tokens that are planned for.
    """

    level: str
    full: CachePlan
    groups: tuple[Held, ...]
    left_out: tuple[str, ...]
    longest_tokens: int


def memory_of(results: Results) -> Memory:
    """Return what results with KV policies tell of memory."""
    level = results.levels[0]
    rows = results.whole[results.whole["level"] == level]
    schedules = dict(zip(rows["policy"], rows["evict_at"], strict=True))
    grouped: dict[tuple[bool, int | None, float], list[Point]] = {}
    for curve in results.methods("kv", "kept_frac", level=level).values():
        point = nearest_asked(curve, WANTED)
        repeats = schedules.get(point.name, "").startswith(_REPEATS)
        budget = _BUDGET.search(point.name)
        key = (repeats, int(budget[1]) if budget else None, round(point.mean, 3))
        grouped.setdefault(key, []).append(point)
    peaks = results.means("kv", "peak_frac", level=level)
    groups = [
        Held(
            points=tuple(points),
            repeats=repeats,
            num_budget_tokens=budget,
            peak_frac=peaks.get(points[0].cell, math.nan),
        )
        for (repeats, budget, _), points in grouped.items()
    ]
    groups.sort(key=lambda one: (one.first.mean, one.name))
    return Memory(
        level=level,
        full=CachePlan(
            cache=CacheShape.of(results.spec), bytes_per_number=results.run["plan"]["kv_bytes"]
        ),
        groups=tuple(groups[:MOST_GROUPS]),
        left_out=tuple(name for one in groups[MOST_GROUPS:] for name in one.families),
        longest_tokens=_longest(results.spec),
    )


def measured_bytes(results: Results, level: str, policies: list[str]) -> pd.DataFrame:
    """Return columns policy, tokens and kv_bytes: the most bytes that each sequence held.

    ``tokens`` are rows of the cache: the last token of a sequence is never read. Cells in which
    nothing was evicted are left out, but for transforms, which evict nothing.
    """
    rows = results.whole
    chosen = (
        (rows["level"] == level) & rows["policy"].isin(policies) & rows["peak_kv_bytes"].notna()
    )
    chosen &= ~rows["is_idle"].astype(bool) | (rows["target_frac"] >= 1)
    lengths = {one["sequence_id"]: one["num_tokens"] for one in results.run["sequences"]}
    found = rows.loc[chosen, ["policy", "sequence_id", "peak_kv_bytes"]]
    return pd.DataFrame(
        {
            "policy": found["policy"],
            "tokens": np.array([lengths[one] - 1 for one in found["sequence_id"]], dtype=np.int64),
            "kv_bytes": found["peak_kv_bytes"],
        }
    ).sort_values(["policy", "tokens"], ignore_index=True)


def _longest(spec: ModelSpec) -> int:
    return spec.trained_positions or spec.max_positions or _DEFAULT_TOKENS
