"""Rows that come a few at a time, gathered in blocks that are allocated whole."""

from __future__ import annotations

import torch

BLOCK_ROWS = 128


class RowBuffer:
    """Rows [..., T, D] of one tensor, appended as decoding makes them.

    Small tensors that stay, allocated between those of a growing cache, would keep the memory that
    the cache frees at each step from being used again: rows are copied into blocks instead.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._filled = 0
        self.num_rows = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return sum(block.nbytes for block in self._blocks)

    def append(self, rows: torch.Tensor) -> None:
        """Add rows; many at once, as a prompt brings them, are kept and not copied."""
        count = rows.shape[-2]
        self.num_rows += count
        if count >= BLOCK_ROWS:
            self._close()
            self._blocks.append(rows)
            self._filled = count
            return
        while count:
            if not self._blocks or self._filled == self._blocks[-1].shape[-2]:
                shape = (*rows.shape[:-2], BLOCK_ROWS, rows.shape[-1])
                self._blocks.append(rows.new_empty(shape))
                self._filled = 0
            part = min(count, self._blocks[-1].shape[-2] - self._filled)
            target = self._blocks[-1][..., self._filled : self._filled + part, :]
            target.copy_(rows[..., rows.shape[-2] - count :, :][..., :part, :])
            self._filled += part
            count -= part

    def joined(self) -> torch.Tensor:
        """Return all rows [..., T, D]."""
        self._close()
        return self._blocks[0] if len(self._blocks) == 1 else torch.cat(self._blocks, dim=-2)

    def _close(self) -> None:
        """Cut the last block to what is filled, so that the next rows open another."""
        if self._blocks:
            self._blocks[-1] = self._blocks[-1][..., : self._filled, :]
