"""Water-filling: amounts in proportion to shares, between bounds, of an exact sum in bytes."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

SMALLEST = 2.0**-40
"""Shares below this part of the largest are 0."""

_STEPS = 2**20
"""Amounts are compared in steps of 1 / this, so that rounding decides nothing."""


def fill(
    share_X: np.ndarray, low_X: np.ndarray, high_X: np.ndarray, size_X: np.ndarray, total: float
) -> np.ndarray:
    """Return min(high, max(low, level * share)) with the level at which the bytes are ``total``.

    Heads of share 0 stay at ``low``; where all others are full, what is left over is spread over
    them evenly.

    Parameters
    ----------
    share_X
        float, not negative.
    low_X, high_X
        Bounds in entries, 0 < low <= high.
    size_X
        Bytes of an entry, integers.
    total
        Bytes. Below the sum of ``low`` these are given, above that of ``high`` those.

    Returns
    -------
    ndarray
        float64 [X].
    """
    filled_X = low_X.astype(np.float64)
    has_share_X = share_X > SMALLEST * share_X.max()
    for part_X, part_share_X in ((has_share_X, share_X), (~has_share_X, np.ones_like(share_X))):
        if part_X.any():
            left = total - float(size_X[~part_X] @ filled_X[~part_X])
            filled_X[part_X] = _fill_positive(
                part_share_X[part_X], low_X[part_X], high_X[part_X], size_X[part_X], left
            )
    return filled_X


def _fill_positive(
    share_X: np.ndarray, low_X: np.ndarray, high_X: np.ndarray, size_X: np.ndarray, total: float
) -> np.ndarray:
    """Fill heads of shares above 0.

    The bytes are piecewise linear in the level, with a bend where a head leaves its lower bound and
    where it reaches the upper: found by bisection over the bends, exact between two of them.
    """
    share_X = share_X / share_X.max()
    leaves_X, reaches_X = low_X / share_X, high_X / share_X

    def used(level: float) -> float:
        return float(size_X @ np.clip(level * share_X, low_X, high_X))

    bends = np.sort(np.concatenate([leaves_X, reaches_X]))
    at = bisect_right(bends, total, key=used)
    if at in (0, len(bends)):
        return low_X if at == 0 else high_X
    is_low_X, is_high_X = leaves_X >= bends[at], reaches_X <= bends[at - 1]
    between_X = ~(is_low_X | is_high_X)
    fixed = size_X[is_low_X] @ low_X[is_low_X] + size_X[is_high_X] @ high_X[is_high_X]
    level = (total - fixed) / (size_X[between_X] @ share_X[between_X])
    filled_X: np.ndarray = np.where(is_low_X, low_X, np.where(is_high_X, high_X, level * share_X))
    bounded_X: np.ndarray = np.clip(filled_X, low_X, high_X)
    return bounded_X


def whole(wanted_X: np.ndarray, high_X: np.ndarray, size_X: np.ndarray, total: int) -> np.ndarray:
    """Return whole entries by largest remainder (Hamilton), of at most ``total`` bytes.

    Each head gets its entries rounded down; what is left goes to heads below their bound, one entry
    each in the order of what was cut off (the first among equals), and round again, as long as an
    entry fits. So less than one entry is left over, and nothing where all entries weigh the same.

    Parameters
    ----------
    wanted_X
        float, of ``total`` bytes.
    high_X
        Most entries, integers.
    size_X
        Bytes of an entry, integers.
    total
        Bytes.

    Returns
    -------
    ndarray
        int64 [X].
    """
    steps_X: np.ndarray = np.rint(wanted_X * _STEPS).astype(np.int64)
    whole_X, rest_X = np.divmod(steps_X, _STEPS)
    left = total - int(size_X @ whole_X)
    if left < size_X.min():
        return whole_X
    order = np.argsort(-rest_X, kind="stable").tolist()
    counts, sizes, most = whole_X.tolist(), size_X.tolist(), high_X.tolist()
    while fitting := [x for x in order if counts[x] < most[x] and sizes[x] <= left]:
        for x in fitting:
            if sizes[x] <= left:
                counts[x] += 1
                left -= sizes[x]
    return np.array(counts, dtype=np.int64)
