"""The first of each row in ascending order, ties by lower place, by radix sort of a part of it.

A sample of the row guesses where its first k end; what lies beyond is left out, and the rest is
sorted. The guess bears on the time alone: a row of which less than k are left is sorted whole.
"""

from __future__ import annotations

import numpy as np

STRIDE = 32
"""Of each row, one number in so many is in the sample."""

MARGIN = 4
"""Standard deviations of the number of the sample that is among the first k, added to its mean."""


def first_places(number_TV: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the k lowest numbers of each row.

    Parameters
    ----------
    number_TV
        int32 [T, V].
    k
        Places a row, at most V.

    Returns
    -------
    ndarray
        int64 [T, k], the lowest number first, ties by lower place.
    """
    num_rows, width = number_TV.shape
    place_TK = np.empty((num_rows, k), dtype=np.int64)
    for row, limit in enumerate(_guessed_limits(number_TV, k)):
        number_V = number_TV[row]
        place_X = (number_V <= limit).nonzero()[0]
        if len(place_X) < k:
            place_X = np.arange(width)
        place_TK[row] = place_X[_ascending(number_V[place_X])[:k]]
    return place_TK


def _guessed_limits(number_TV: np.ndarray, k: int) -> np.ndarray:
    """Return a number for each row that most likely has at least k of the row at or below it."""
    sample_TX = number_TV[:, ::STRIDE]
    mean = k / STRIDE
    last = int(mean + MARGIN * (mean**0.5 + 1))
    if last >= sample_TX.shape[1]:
        return np.full(len(number_TV), np.iinfo(np.int32).max, dtype=np.int32)
    limit_T: np.ndarray = np.partition(sample_TX, last, axis=1)[:, last]
    return limit_T


def _ascending(number_X: np.ndarray) -> np.ndarray:
    """Return the stable ascending order of int32; numpy radix sorts 16 bits at a time."""
    order_X = (number_X & 0xFFFF).astype(np.uint16).argsort(kind="stable")
    high_X = (number_X >> 16).astype(np.int16)[order_X]
    order: np.ndarray = order_X[high_X.argsort(kind="stable")]
    return order
