"""A quantile of all steps alike, with its interval over whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit.measure.stats import MIN_SEQUENCES

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_RESAMPLES = 1000
_ENDS = (0.025, 0.975)


def pooled_quantile(
    values_S: ArrayLike, code_S: ArrayLike, quantile: float, *, seed: int
) -> tuple[float, float, float]:
    """Return the least value that a share of all values does not pass, and its 95 % interval.

    Whole sequences are drawn with replacement, as in ``measure.stats.bootstrap_mean``; a draw's
    quantile is that of all its steps together.

    Parameters
    ----------
    values_S
        A value of each step, finite.
    code_S
        Sequence of each step, from 0 without a gap.
    quantile
        Above 0 and at most 1.
    seed
        Of the resampling.

    Returns
    -------
    tuple
        Value, low and high; the ends are NaN below 3 sequences.
    """
    values_S, code_S = np.asarray(values_S, dtype=np.float64), np.asarray(code_S)
    num, order = int(code_S.max()) + 1, np.argsort(values_S, kind="stable")
    sorted_S = values_S[order]
    # Steps of each sequence among the lowest 0, 1, 2 ... values.
    below_NS = np.zeros((num, len(sorted_S) + 1), dtype=np.int64)
    below_NS[code_S[order], np.arange(1, len(sorted_S) + 1)] = 1
    np.cumsum(below_NS, axis=1, out=below_NS)
    value = float(sorted_S[_place(np.ones((1, num), dtype=np.int64), below_NS, quantile)[0]])
    if num < MIN_SEQUENCES:
        return value, float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(num, size=(_RESAMPLES, num))
    cell = (drawn + num * np.arange(_RESAMPLES)[:, None]).ravel()
    times_RN = np.bincount(cell, minlength=_RESAMPLES * num).reshape(_RESAMPLES, num)
    draws_R = sorted_S[_place(times_RN, below_NS, quantile)]
    low, high = np.quantile(draws_R, _ENDS, method="inverted_cdf")
    return value, float(low), float(high)


def _place(times_RN: np.ndarray, below_NS: np.ndarray, quantile: float) -> np.ndarray:
    """Return the place of the quantile among all values, sequences counted so often; by halving."""
    wanted_R = quantile * (times_RN @ below_NS[:, -1])
    low_R = np.zeros(len(times_RN), dtype=np.int64)
    high_R = np.full(len(times_RN), below_NS.shape[1] - 1)
    while (low_R < high_R).any():
        middle_R = (low_R + high_R) // 2
        has_R = (times_RN * below_NS[:, middle_R].T).sum(axis=1) >= wanted_R
        low_R, high_R = np.where(has_R, low_R, middle_R + 1), np.where(has_R, middle_R, high_R)
    return low_R - 1
