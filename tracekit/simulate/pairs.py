"""Pairs of policies that a user chooses between, and whether an estimate orders them rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Pairs(NamedTuple):
    """Pairs of policies of one target on one sequence, by what can be said of their order."""

    sequence_id: str
    num_cells: int
    num_right: int
    num_counted: int
    num_tied: int
    num_near: int

    @classmethod
    def of(cls, sequence_id: str, told: ArrayLike, kl: ArrayLike, noise: ArrayLike) -> Pairs:
        """Count the pairs of N cells."""
        told_N, kl_N, noise_N = (np.asarray(one, np.float64) for one in (told, kl, noise))
        i, j = np.triu_indices(len(kl_N), 1)
        change_P, told_P = kl_N[i] - kl_N[j], told_N[i] - told_N[j]
        is_tied = (change_P == 0) | (told_P == 0)
        is_near = ~is_tied & (np.abs(change_P) <= np.maximum(noise_N[i], noise_N[j]))
        is_counted = ~is_tied & ~is_near
        is_right = is_counted & ((change_P > 0) == (told_P > 0))
        counts = (int(one.sum()) for one in (is_right, is_counted, is_tied, is_near))
        return cls(sequence_id, len(kl_N), *counts)
