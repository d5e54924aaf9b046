"""The Pareto front: which of several points no other one beats. Numpy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def pareto_front(cost_N: ArrayLike, loss_N: ArrayLike) -> NDArray[np.bool_]:
    """Tell which points no other point beats.

    A point is beaten by one that is no worse in both and better in one; equal points do not beat
    each other.

    Parameters
    ----------
    cost_N, loss_N
        [N] each, float; less is better. No NaN.

    Returns
    -------
    numpy.ndarray
        [N], bool.
    """
    costs, losses = np.asarray(cost_N, np.float64), np.asarray(loss_N, np.float64)
    order = np.lexsort((losses, costs))
    cost_N, loss_N = costs[order], losses[order]
    # Least loss among strictly smaller costs, and among points of the same cost.
    first_N = np.searchsorted(cost_N, cost_N, side="left")
    least_N = np.concatenate(([np.inf], np.minimum.accumulate(loss_N)))
    is_front_N = np.empty(len(order), bool)
    is_front_N[order] = (loss_N < least_N[first_N]) & (loss_N == loss_N[first_N])
    return is_front_N
