"""Rows that decoding makes one at a time, all layers' together in blocks that are allocated whole.

Small tensors that stay, allocated between those of a growing cache, would keep the memory that the
cache frees at each step from being used again; and one copy a step costs less than one a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_ROWS = 128
"""Most steps of a block."""

BLOCK_BYTES = 16 << 20
"""A block is not made larger than this, one step aside."""

Key = tuple[int, str]
"""Layer and name of a tensor."""


@dataclass
class _Block:
    """Some steps of tensors of one shape, type and device: [steps, tensors * B, X, 1, D]."""

    keys: list[Key]
    rows: torch.Tensor
    batch_size: int
    num_filled: int = 0

    @classmethod
    def of(cls, keys: list[Key], step: Sequence[torch.Tensor]) -> _Block:
        """Return an empty block for the tensors of a step."""
        first = step[0]
        num_bytes = sum(tensor.nbytes for tensor in step)
        count = max(1, min(BLOCK_ROWS, BLOCK_BYTES // num_bytes))
        rows = first.new_empty((count, len(keys) * len(first), *first.shape[1:]))
        return cls(keys, rows, len(first))

    @property
    def is_full(self) -> bool:
        return self.num_filled == len(self.rows)

    def add(self, step: Sequence[torch.Tensor]) -> None:
        torch.cat(tuple(step), out=self.rows[self.num_filled])
        self.num_filled += 1

    def pieces(self) -> dict[Key, torch.Tensor]:
        """Return each tensor's rows [B, X, steps, D]."""
        rows = self.rows[: self.num_filled, ..., 0, :]
        by_key = rows.unflatten(1, (len(self.keys), self.batch_size))
        return {key: by_key[:, at].permute(1, 2, 0, 3) for at, key in enumerate(self.keys)}


class Strips:
    """Tensors [B, X, 1, D] of one row each, gathered step by step."""

    def __init__(self) -> None:
        self._step: dict[Key, torch.Tensor] = {}
        self._closed: list[_Block] = []
        self._open: list[_Block] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are filled."""
        blocks = [*self._closed, *self._open]
        return sum(block.rows[0].nbytes * block.num_filled for block in blocks)

    def put(self, layer: int, name: str, rows: torch.Tensor) -> None:
        """Add a tensor of this step; it is read when the step ends."""
        self._step[layer, name] = rows

    def end_step(self) -> None:
        """Copy the tensors of this step; those of every step must be the same."""
        if not self._step:
            return
        if not self._open or any(block.is_full for block in self._open):
            self._closed += self._open
            self._open = [
                _Block.of(keys, [self._step[key] for key in keys]) for keys in self._groups()
            ]
        for block in self._open:
            block.add([self._step[key] for key in block.keys])
        self._step = {}

    def take(self) -> dict[Key, list[torch.Tensor]]:
        """Return the rows of each tensor in order, in pieces [B, X, steps, D], and forget them."""
        taken: dict[Key, list[torch.Tensor]] = {}
        for block in [*self._closed, *self._open]:
            for key, piece in block.pieces().items():
                taken.setdefault(key, []).append(piece)
        self._closed, self._open = [], []
        return taken

    def _groups(self) -> list[list[Key]]:
        """Return the tensors of this step that can be joined."""
        groups: dict[tuple[object, ...], list[Key]] = {}
        for key, one in self._step.items():
            groups.setdefault((one.shape, one.dtype, one.device), []).append(key)
        return list(groups.values())
