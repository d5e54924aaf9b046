"""Steps in a row whose most likely token is a candidate: so long a greedy decoder is exact."""

from __future__ import annotations

import numpy as np

EXACT_STEPS = 256
"""Steps in a row of which it is told how often none is missed."""


def runs_of_hits(
    is_hit_X: np.ndarray, is_first_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how runs of hits stand at each step.

    Parameters
    ----------
    is_hit_X
        Hits, step after step, bool.
    is_first_X
        Where another sequence begins; the first step is one.

    Returns
    -------
    tuple of arrays
        Whether a run begins at the step, bool [X]; hits in a row up to and with it, and steps of its
        sequence up to and with it, int64 [X].
    """
    place_X = np.arange(len(is_hit_X))
    after_X = np.where(is_first_X, place_X, 0)
    length_X = place_X - np.maximum.accumulate(after_X) + 1
    broken_X = np.where(is_hit_X, np.where(is_first_X, place_X - 1, -1), place_X)
    run_X = place_X - np.maximum.accumulate(broken_X)
    return run_X == 1, run_X, length_X
