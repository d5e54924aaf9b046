"""Means over sequences with their intervals. Numpy alone: reports read this without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MIN_SEQUENCES = 3
"""Fewer sequences have no interval."""


@dataclass(frozen=True)
class Interval:
    """A mean over sequences with its bootstrap interval.

    Parameters
    ----------
    mean
        Mean over the sequences; None if there are none.
    low, high
        Ends of the interval; None below three sequences.
    n
        Sequences that have a value.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int


def bootstrap_mean(
    values_by_sequence: ArrayLike,
    *,
    seed: int,
    resamples: int = 1000,
    level: float = 0.95,
    weights: ArrayLike | None = None,
) -> Interval:
    """Return the mean of one value a sequence, with its percentile bootstrap interval.

    Whole sequences are drawn with replacement, because the tokens of one text are not independent
    of each other.

    Parameters
    ----------
    values_by_sequence
        One value a sequence; NaN (does not apply there) is left out.
    seed
        Of the resampling: same values and seed, same interval.
    resamples
        Draws.
    level
        Share of the draws that the interval holds.
    weights
        Weight of each sequence (its scored tokens, say), above 0; all the same if None.

    Returns
    -------
    Interval
        The ends are draws, not interpolated between two, so that infinite values stay infinite.

    Raises
    ------
    UsageError
        If weights and values differ in number, a weight is not above 0, or ``resamples`` or
        ``level`` are out of range.
    """
    if resamples < 1 or not 0 < level < 1:
        msg = f"bootstrap of {resamples} resamples at level {level:g}: give 1 or more, and (0, 1)."
        raise UsageError(msg)
    values = np.asarray(values_by_sequence, dtype=np.float64)
    shares = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    if shares.shape != values.shape or not (shares > 0).all():
        msg = f"{shares.size} weights for {values.size} sequences: give each one above 0."
        raise UsageError(msg)
    is_there = ~np.isnan(values)
    values, shares = values[is_there], shares[is_there]
    n = len(values)
    if n == 0:
        return Interval(None, None, None, 0)
    mean = float(values @ shares / shares.sum())
    if n < MIN_SEQUENCES:
        return Interval(mean, None, None, n)
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    means = (values * shares)[drawn].sum(axis=1) / shares[drawn].sum(axis=1)
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(means, ends, method="inverted_cdf")
    return Interval(mean, float(low), float(high), n)


def paired_difference(
    values_by_sequence: ArrayLike,
    baseline_by_sequence: ArrayLike,
    *,
    seed: int,
    resamples: int = 1000,
    level: float = 0.95,
    weights: ArrayLike | None = None,
) -> Interval:
    """Return the mean of value minus baseline on the same sequences, with its interval.

    Pairing removes what the sequences differ in from each other; the interval is of the difference,
    not made from two intervals.

    Parameters
    ----------
    values_by_sequence, baseline_by_sequence
        One value a sequence, in the same order; a pair without a difference (a NaN, or twice the
        same infinity) is left out.
    seed, resamples, level, weights
        As in ``bootstrap_mean``.

    Raises
    ------
    UsageError
        If the two differ in number, and as ``bootstrap_mean`` says.
    """
    values = np.asarray(values_by_sequence, dtype=np.float64)
    baseline = np.asarray(baseline_by_sequence, dtype=np.float64)
    if values.shape != baseline.shape:
        msg = f"{values.size} values and {baseline.size} baselines: give pairs."
        raise UsageError(msg)
    with np.errstate(invalid="ignore"):
        difference = values - baseline
    return bootstrap_mean(difference, seed=seed, resamples=resamples, level=level, weights=weights)
