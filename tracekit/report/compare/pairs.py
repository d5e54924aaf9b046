"""Paired differences B - A of a measure, over prompts, with their intervals."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tracekit.measure.stats import Interval, bootstrap_mean
from tracekit.report.compare.side import CELL
from tracekit.report.verdict.yardstick import DOMAIN_PROMPTS
from tracekit.schema import ANY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracekit.report.compare.match import Match
    from tracekit.report.compare.measures import Measure
    from tracekit.report.compare.side import Side

RESAMPLES = 1_000
"""Draws of prompts, with replacement."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One measure of one cell, B - A, over paired prompts.

    Parameters
    ----------
    measure
        What is compared.
    level
        Level of truth; ``recorded`` for what the trace says.
    name, place
        The policy, scheme or rule, and its size or layer (``side.NO_PLACE`` where it has none).
    domain
        A domain, or ``all``.
    is_causal
        False for a bound that no decoder has.
    a, b
        Means on both sides over the same prompts; None without any.
    interval
        Mean of the differences and its 95 % interval; ``n`` counts prompts.
    num_sequences
        Sequences that the prompts have.
    num_idle
        Sequences left out because nothing was evicted on a side.
    num_flagged
        Sequences among those compared whose budget was clipped or clamped on a side.
    num_missing
        Sequences left out because a side has no value.
    """

    measure: Measure
    level: str
    name: str
    place: int
    domain: str
    is_causal: bool
    a: float | None
    b: float | None
    interval: Interval
    num_sequences: int
    num_idle: int
    num_flagged: int
    num_missing: int

    @property
    def cell(self) -> tuple[str, str, int]:
        """What names the cell in every measure."""
        return self.level, self.name, self.place

    @property
    def verdict(self) -> str:
        """Better, worse, more, less or equal, where the interval says so; else why it does not."""
        low, mean, high = self.interval.low, self.interval.mean, self.interval.high
        if mean is None:
            return "no value"
        if low is None or high is None:
            return "no interval"
        if low == high == 0:
            return "equal"
        if low <= 0 <= high:
            return "unclear"
        more, less = {0: ("more", "less"), 1: ("better", "worse"), -1: ("worse", "better")}[
            self.measure.better
        ]
        return more if mean > 0 else less

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        measure, interval = own.pop("measure"), own.pop("interval")
        return {
            "question": measure.question,
            "measure": measure.name,
            "unit": measure.unit,
            **own,
            "difference": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "n": interval.n,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The paired sequences of one cell: values [N], of both sides."""

    prompt_N: np.ndarray  # number of the prompt, in the order of their first sequences
    domain_N: np.ndarray
    is_idle_N: np.ndarray
    is_flagged_N: np.ndarray
    is_causal: bool
    values: Mapping[str, tuple[np.ndarray, np.ndarray]]
    same_given_N: np.ndarray


def differences(
    frames: tuple[pd.DataFrame, pd.DataFrame],
    sides: tuple[Side, Side],
    match: Match,
    measures: Sequence[Measure],
    *,
    seed: int,
) -> Iterator[Difference]:
    """Yield the differences of one question: of each cell and measure, of all, then by domain.

    Samples of one prompt are averaged first; prompts are resampled. A measure that no sequence of
    a cell has on either side does not apply there and has no difference. What B lacks of a cell of A,
    or A of one that B has too, is missing; cells that B alone has are none.

    Parameters
    ----------
    frames
        Rows of both sides, as ``Side.frames`` has them.
    sides, match
        Whose they are, and which sequences are pairs.
    measures
        Those of this question that are wanted.
    seed
        Of the bootstrap.
    """
    a, b = (frame[frame["sequence_id"].isin(match.paired)] for frame in frames)
    if a.empty:
        return
    on = [*CELL, "sequence_id"]
    merged = a.merge(
        b, how="outer", on=on, suffixes=("_a", "_b"), validate="one_to_one", indicator="side"
    )
    known = sides[0].sequences
    for _, rows in merged.groupby(list(CELL), sort=True):
        if rows["side"].eq("right_only").all():
            continue
        level, name, place = (rows[column].iloc[0] for column in CELL)
        pairs = _pairs(rows, known, match, measures)
        for one in measures:
            yield from _of_cell(one, (str(level), str(name), int(place)), pairs, seed)


def _pairs(
    rows: pd.DataFrame,
    known: dict[str, dict[str, Any]],
    match: Match,
    measures: Sequence[Measure],
) -> _Pairs:
    names = rows["sequence_id"]
    either = {
        flag: (rows[f"{flag}_a"].eq(True) | rows[f"{flag}_b"].eq(True)).to_numpy(dtype=bool)
        for flag in ("is_idle", "is_flagged")
    }
    return _Pairs(
        prompt_N=pd.factorize(np.array([known[name]["prompt_id"] for name in names], object))[0],
        domain_N=np.array([known[name]["domain"] for name in names], dtype=object),
        is_idle_N=either["is_idle"],
        is_flagged_N=either["is_flagged"],
        is_causal=bool(rows["is_causal_a"].ne(False).all() and rows["is_causal_b"].ne(False).all()),
        values={
            one.name: (rows[f"{one.name}_a"].to_numpy(), rows[f"{one.name}_b"].to_numpy())
            for one in measures
        },
        same_given_N=names.isin(match.same_given).to_numpy(),
    )


def _of_cell(
    measure: Measure, cell: tuple[str, str, int], pairs: _Pairs, seed: int
) -> Iterator[Difference]:
    """Yield one measure of a cell, over all prompts and over the domains that have enough."""
    a_N, b_N = pairs.values[measure.name]
    applies_N = pairs.same_given_N if measure.needs_given else np.ones(len(a_N), dtype=bool)
    if not (applies_N & ~(np.isnan(a_N) & np.isnan(b_N))).any():
        return
    yield _difference(measure, cell, pairs, applies_N, ANY, seed)
    for domain in sorted(set(pairs.domain_N)):
        chosen_N = applies_N & (pairs.domain_N == domain)
        if len(set(pairs.prompt_N[chosen_N])) < DOMAIN_PROMPTS:
            continue
        found = _difference(measure, cell, pairs, chosen_N, str(domain), seed)
        if found.interval.n >= DOMAIN_PROMPTS:
            yield found


def _difference(
    measure: Measure,
    cell: tuple[str, str, int],
    pairs: _Pairs,
    chosen_N: np.ndarray,
    domain: str,
    seed: int,
) -> Difference:
    a_N, b_N = pairs.values[measure.name]
    with np.errstate(invalid="ignore"):
        difference_N = b_N - a_N  # twice the same infinity is no difference: missing
    is_there_N = ~np.isnan(difference_N)
    used_N = chosen_N & ~pairs.is_idle_N & is_there_N
    level, name, place = cell
    return Difference(
        measure=measure,
        level=level,
        name=name,
        place=place,
        domain=domain,
        is_causal=pairs.is_causal,
        a=_mean(_by_prompt(a_N, used_N, pairs.prompt_N)),
        b=_mean(_by_prompt(b_N, used_N, pairs.prompt_N)),
        interval=bootstrap_mean(
            _by_prompt(difference_N, used_N, pairs.prompt_N), seed=seed, resamples=RESAMPLES
        ),
        num_sequences=int(used_N.sum()),
        num_idle=int((chosen_N & pairs.is_idle_N).sum()),
        num_flagged=int((used_N & pairs.is_flagged_N).sum()),
        num_missing=int((chosen_N & ~pairs.is_idle_N & ~is_there_N).sum()),
    )


def _by_prompt(values_N: np.ndarray, used_N: np.ndarray, prompt_N: np.ndarray) -> np.ndarray:
    """Return the mean of the samples of each prompt that has some, in the order of prompts."""
    counts_P = np.bincount(prompt_N[used_N])
    sums_P = np.bincount(prompt_N[used_N], weights=values_N[used_N])
    means_P: np.ndarray = sums_P[counts_P > 0] / counts_P[counts_P > 0]
    return means_P


def _mean(values_P: np.ndarray) -> float | None:
    return float(values_P.mean()) if len(values_P) else None
