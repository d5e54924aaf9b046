"""Two groups of prompts beside each other: no pairs, so each is resampled on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit.measure.stats import MIN_SEQUENCES, Interval

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

RESAMPLES = 10_000
"""Draws: the ends of a corrected interval lie far out."""


def group_difference(
    values: ArrayLike, others: ArrayLike, *, seed: int, level: float = 0.95
) -> Interval:
    """Return the mean of a group less that of another, with its percentile bootstrap interval.

    Parameters
    ----------
    values, others
        One number a prompt, without NaN, at least one in each group.
    seed
        Of the resampling: same values and seed, same interval.
    level
        Share of the draws that the interval holds.

    Returns
    -------
    Interval
        Its n is that of the smaller group; no ends below three prompts in either.
    """
    groups = [np.asarray(one, dtype=np.float64) for one in (values, others)]
    mean = float(groups[0].mean() - groups[1].mean())
    n = min(map(len, groups))
    if n < MIN_SEQUENCES:
        return Interval(mean, None, None, n)
    rng = np.random.default_rng(seed)
    first_R, second_R = (
        one[rng.integers(len(one), size=(RESAMPLES, len(one)))].mean(axis=1) for one in groups
    )
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(first_R - second_R, ends, method="inverted_cdf")
    return Interval(mean, float(low), float(high), n)
