"""Sums over sequences divided by each other, very many at once, with bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.measure.stats import MIN_SEQUENCES

RESAMPLES = 1000
LEVEL = 0.95
BLOCK_ROWS = 2000
"""Quotients that are resampled at once: their draws stay below 20 MB."""


@dataclass(frozen=True, eq=False)
class Quotients:
    """Quotients with their intervals, all of one shape; NaN is what does not apply.

    Parameters
    ----------
    value, low, high
        Sum over sum, and the ends of its interval.
    n
        Sequences that count, int64.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def quotients(over: np.ndarray, under: np.ndarray, *, seed: int) -> Quotients:
    """Return sums of one number over sums of another, whole sequences resampled.

    Parameters
    ----------
    over
        What each sequence adds above, float64 [..., N]; 0 where it does not count, infinity stays.
    under
        What it adds below, of the same shape or one that is repeated; where it is 0 the sequence
        does not count in that quotient.
    seed
        Of the resampling.

    Returns
    -------
    Quotients
        [...] each. All quotients over the same sequences see the same draws, which are those of
        ``measure.stats.bootstrap_mean`` with weights; ends are draws, null below 3 sequences.
    """
    shape, num = over.shape[:-1], over.shape[-1]
    over_KN = over.reshape(-1, num)
    under_KN = np.ascontiguousarray(np.broadcast_to(under, over.shape)).reshape(-1, num)
    counts_KN = under_KN > 0
    n_K = counts_KN.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        value_K = over_KN.sum(1) / under_KN.sum(1)
    ends_2K = np.full((2, len(over_KN)), np.nan)
    patterns, pattern_K = np.unique(counts_KN, axis=0, return_inverse=True)
    for number, there_N in enumerate(patterns):
        if there_N.sum() < MIN_SEQUENCES:
            continue
        times_RN = _times(int(there_N.sum()), seed)
        rows_K = np.flatnonzero(pattern_K.ravel() == number)
        for start in range(0, len(rows_K), BLOCK_ROWS):
            rows = rows_K[start : start + BLOCK_ROWS]
            ends_2K[:, rows] = _ends(
                over_KN[rows][:, there_N], under_KN[rows][:, there_N], times_RN
            )
    parts = (value_K, ends_2K[0], ends_2K[1], n_K)
    return Quotients(*(one.reshape(shape) for one in parts))


def _times(n: int, seed: int) -> np.ndarray:
    """Return how often each resample draws each sequence, float64 [R, N]."""
    drawn_RN = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    flat = (drawn_RN + n * np.arange(RESAMPLES)[:, None]).ravel()
    return np.bincount(flat, minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(np.float64)


def _ends(over_KN: np.ndarray, under_KN: np.ndarray, times_RN: np.ndarray) -> np.ndarray:
    """Return both ends of the intervals, [2, K]."""
    is_infinite_KN = np.isinf(over_KN)
    drawn_KR = np.where(is_infinite_KN, 0, over_KN) @ times_RN.T
    if is_infinite_KN.any():  # infinity times 0 draws is no number
        drawn_KR[(is_infinite_KN @ times_RN.T) > 0] = np.inf
    drawn_KR /= under_KN @ times_RN.T
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    found: np.ndarray = np.quantile(drawn_KR, ends, axis=1, method="inverted_cdf")
    return found
