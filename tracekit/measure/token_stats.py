"""Statistics over the steps of many sequences: all that llama.cpp's perplexity tool prints, and more.

Numpy alone: reports read this without torch. Source: ``kl_divergence`` of llama.cpp's
tools/perplexity/perplexity.cpp. Differs from it in float64 throughout, in an error of None where
the tool prints 0 (up to 10 tokens) or NaN, and in statistics of fewer than 100 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import UsageError
from tracekit.measure.token_errors import number_or_none
from tracekit.measure.token_means import MEAN_STATISTICS, mean_of
from tracekit.measure.token_table import TokenTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.token_errors import Errors
    from tracekit.measure.token_means import MeanStatistic
    from tracekit.measure.token_rows import NextToken

PERCENTILES: dict[str, tuple[str, tuple[float, ...]]] = {
    "kl_mean": ("kl", (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)),
    "delta_p_mean": ("delta_p", (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)),
}
"""After which mean the percentiles of which column follow."""

_NAMES: dict[float, str] = {100: "max", 50: "median", 0: "min"}


@dataclass(frozen=True)
class Statistic:
    """One number about many steps; None is what does not apply.

    Parameters
    ----------
    name, unit
        Its name; ``nats``, ``tokens``, or '' where there is none. Probabilities are not per cent.
    value
        Over all steps alike (micro average).
    macro
        Of means over sequences of each sequence's mean: all sequences alike.
    low, high
        Interval of ``value`` by resampling sequences.
    error
        Standard error of ``value`` that takes tokens for independent.
    """

    name: str
    unit: str
    value: float | None
    macro: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None


def token_statistics(sequences: Sequence[NextToken], errors: Errors) -> list[Statistic]:
    """Return the statistics, in llama.cpp's order, then those that it does not print.

    Parameters
    ----------
    sequences
        Measures of the scored steps of each sequence. Steps without a distribution are left out
        and counted in ``num_left_out``; sequences without a step do not count.
    errors
        How sure they are: ``SequenceBootstrap`` or ``TokenGaussian``.

    Returns
    -------
    list
        Perplexities and their correlation, change (ln), quotient and difference; KL: mean,
        percentiles; change of the token's probability: mean, percentiles, RMS; share of the same
        most likely token; then JSD, margins, ``num_flips``, ``num_left_out``. Percentiles are over
        tokens, interpolated linearly, without macro average, interval or error.
    """
    table = TokenTable.of(sequences)
    found = []
    for one in _means(MEAN_STATISTICS, table, errors):
        found.append(one)
        found += _percentiles(one, table)
    flips = float(np.count_nonzero(table.columns["same_top"] == 0)) if table.num_steps else None
    found.append(Statistic("num_flips", "tokens", flips))
    found.append(Statistic("num_left_out", "tokens", float(table.num_left_out)))
    return found


def exact_match(
    sequences: Sequence[NextToken], is_answer: Sequence[np.ndarray], errors: Errors
) -> list[Statistic]:
    """Return the share of sequences whose marked answer is right, for both runs.

    A greedy decoder gives the recorded answer exactly if each most likely token along it is the
    recorded one, so teacher forcing decides it.

    Parameters
    ----------
    sequences
        Measures of the scored steps of each sequence.
    is_answer
        Which of these steps belong to the answer, bool [R] a sequence; those without any are left
        out.
    errors
        As in ``token_statistics``; a sequence counts as one trial.

    Returns
    -------
    list
        ``exact_match_pruned`` and ``exact_match_full``; None if no sequence has an answer.

    Raises
    ------
    UsageError
        If steps and marks differ in number.
    """
    if [len(rows) for rows in sequences] != [len(mask_R) for mask_R in is_answer]:
        msg = "answers are marked on other steps than were measured: give one mark a step."
        raise UsageError(msg)
    asked = [
        rows.where(np.asarray(mask_R, dtype=bool))
        for rows, mask_R in zip(sequences, is_answer, strict=True)
        if np.any(mask_R)
    ]
    return [
        _share("exact_match_pruned", [bool(rows.hit.all()) for rows in asked], errors),
        _share("exact_match_full", [bool(rows.hit_full.all()) for rows in asked], errors),
    ]


def _means(
    statistics: Sequence[MeanStatistic], table: TokenTable, errors: Errors
) -> list[Statistic]:
    if not table.num_steps:
        return [Statistic(one.name, one.unit, None) for one in statistics]
    bars = errors.bars(statistics, table)
    micro, macro = table.micro(), table.macro()
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            Statistic(
                one.name,
                one.unit,
                number_or_none(one.value(micro)),
                number_or_none(one.value(macro)),
                bar.low,
                bar.high,
                bar.error,
            )
            for one, bar in zip(statistics, bars, strict=True)
        ]


def _percentiles(mean: Statistic, table: TokenTable) -> list[Statistic]:
    """Return the percentiles that follow a mean."""
    if mean.name not in PERCENTILES:
        return []
    column, percents = PERCENTILES[mean.name]
    names = [f"{column}_{_NAMES.get(percent, f'p{percent:g}')}" for percent in percents]
    if not table.num_steps:
        return [Statistic(name, mean.unit, None) for name in names]
    values = _interpolated(table.columns[column], percents)
    return [Statistic(name, mean.unit, value) for name, value in zip(names, values, strict=True)]


def _interpolated(values: np.ndarray, percents: Sequence[float]) -> list[float]:
    """Return percentiles; between a number and infinity lies infinity, not NaN."""
    sorted_N = np.sort(values)
    place = np.asarray(percents) / 100 * (len(values) - 1)
    below = place.astype(np.int64)
    share = place - below
    low, high = sorted_N[below], sorted_N[np.minimum(below + 1, len(values) - 1)]
    with np.errstate(invalid="ignore"):
        mixed = low + share * (high - low)
    # At a place of a value that value; its neighbour may be infinite.
    found: list[float] = np.where((share == 0) | (low == high), low, mixed).tolist()
    return found


def _share(name: str, is_right: Sequence[bool], errors: Errors) -> Statistic:
    return _means((mean_of(name, "", "right"),), TokenTable.of_trials("right", is_right), errors)[0]
