"""Hidden states that leave chosen layers, while they wait to be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tracekit.record.strips import Strips

RESIDUAL = "residual"
"""Kind of the tensor in a trace, and the name under which single rows wait in the strips."""


class Residuals:
    """Rows [B, T, E] of chosen layers that wait: many as they are, single ones in the strips.

    Parameters
    ----------
    strips
        Where single rows go until they are taken back.
    """

    def __init__(self, strips: Strips) -> None:
        self._strips = strips
        self._pieces: dict[int, list[torch.Tensor]] = {}
        self._firsts: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that wait here."""
        return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)

    @property
    def waiting(self) -> list[int]:
        """Layers that have rows here."""
        return list(self._pieces)

    def add(self, layer: int, hidden_BTE: torch.Tensor) -> None:
        """Let the rows of one pass wait."""
        rows_B1TE = hidden_BTE[:, None]
        if hidden_BTE.shape[1] == 1:
            self._strips.put(layer, RESIDUAL, rows_B1TE)
        else:
            self.take_back(layer, [rows_B1TE])

    def take_back(self, layer: int, pieces: list[torch.Tensor]) -> None:
        """Append pieces [B, 1, T, E], in order."""
        self._pieces.setdefault(layer, []).extend(piece[:, 0] for piece in pieces)

    def clear(self, layer: int) -> tuple[int, torch.Tensor]:
        """Return the column of a layer's first row and its rows [B, T, E], and forget them."""
        pieces = self._pieces.pop(layer)
        rows_BTE = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        first = self._firsts.get(layer, 0)
        self._firsts[layer] = first + rows_BTE.shape[1]
        return first, rows_BTE
