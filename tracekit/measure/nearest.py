"""Nearest rows of a matrix by cosine: found for the rows that are asked for, and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from tracekit.measure.logits import best_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_NUMBERS = 1 << 23
"""Cosines in one block."""

WIDE_NUMBERS = 1 << 20
"""Numbers of the matrix that are widened to float64 at once: few enough to stay in the cache."""

SMALLEST = torch.finfo(torch.float64).tiny
"""Least length of a row that is divided by: the cosine with a row of zeros is 0."""


@final
class NearestRows:
    """The nearest other rows of each row, nearest first, ties by lower number.

    Cosines are taken in float64 and compared as float32: rows that are alike up to rounding tie, and
    the order does not hang on which rows are asked for together.

    Parameters
    ----------
    rows_VE
        Matrix [V, E], any floating type.
    n
        Neighbours wanted, 0 or more; there are V - 1 at most.
    """

    def __init__(self, rows_VE: torch.Tensor, n: int) -> None:
        self._rows_VE = rows_VE
        self._num_wide = max(1, WIDE_NUMBERS // rows_VE.shape[1])
        num_rows = len(rows_VE)
        width = min(n, num_rows - 1)
        self._ids_VN = torch.empty((num_rows, width), dtype=torch.int64)
        self._is_found_V = torch.full((num_rows,), width == 0)
        lengths = [part_VE.norm(dim=1).clamp_min(SMALLEST) for part_VE in self._wide()]
        self._length_V = torch.cat(lengths)

    @property
    def width(self) -> int:
        """Neighbours that a row has, N."""
        return self._ids_VN.shape[1]

    def of(self, ids_X: torch.Tensor) -> torch.Tensor:
        """Return the neighbours of some rows, int64 [..., N], on the CPU.

        Parameters
        ----------
        ids_X
            Numbers of rows, int64 of any shape, on the CPU.
        """
        new_M = ids_X[~self._is_found_V[ids_X]].unique()
        size = max(1, BLOCK_NUMBERS // len(self._rows_VE))
        for start in range(0, len(new_M), size):
            part_M = new_M[start : start + size]
            self._ids_VN[part_M] = self._search(part_M)
            self._is_found_V[part_M] = True
        return self._ids_VN[ids_X]

    def _search(self, ids_M: torch.Tensor) -> torch.Tensor:
        own_ME = self._rows_VE[ids_M].double() / self._length_V[ids_M, None]
        parts = zip(self._wide(), self._length_V.split(self._num_wide), strict=True)
        cosine_MV = torch.cat(
            [(own_ME @ part_VE.T).div_(length_V).float() for part_VE, length_V in parts], 1
        )
        cosine_MV[torch.arange(len(ids_M)), ids_M] = -torch.inf
        return best_ids(cosine_MV, self.width).cpu()

    def _wide(self) -> Iterator[torch.Tensor]:
        """Yield the matrix in float64, in blocks of rows."""
        for part_VE in self._rows_VE.split(self._num_wide):
            yield part_VE.double()
