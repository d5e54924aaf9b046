"""New rows of one layer that wait to be written, and the keys that they see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tracekit.record.buffer import RowBuffer

if TYPE_CHECKING:
    from tracekit.model.tap import AttentionCall
    from tracekit.record.attention_stats import KeyTotals
    from tracekit.spec import LayerSpec


@dataclass
class Rows(ABC):
    """New rows of one layer that wait to be written, and the keys that they see."""

    layer: LayerSpec
    totals: KeyTotals
    first: int = 0
    queries: RowBuffer = field(default_factory=RowBuffer)

    @property
    def num_bytes(self) -> int:
        """Bytes that wait."""
        return self.queries.num_bytes

    def add(self, call: AttentionCall) -> None:
        """Let the rows of one call wait."""
        self.queries.append(call.query_BHQD[0])
        self.keep(call, call.query_BHQD.shape[2])

    @abstractmethod
    def keep(self, call: AttentionCall, num_new: int) -> None:
        """Keep a call's new keys and values."""

    @abstractmethod
    def take(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the waiting rows' keys and values, and all keys that they see."""

    def clear(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys, values and the keys in sight, and forget the rows."""
        query = self.queries.joined()
        rows = (query, *self.take(query.shape[1]))
        self.queries = RowBuffer()
        self.first += query.shape[1]
        return rows


@dataclass
class FullRows(Rows):
    """Every call of a full layer is given all keys so far: the last call's are enough."""

    key_GKD: torch.Tensor | None = None
    value_GKD: torch.Tensor | None = None

    def keep(self, call: AttentionCall, num_new: int) -> None:
        """Keep what the cache holds anyway."""
        del num_new
        self.key_GKD, self.value_GKD = call.key_BGKD[0], call.value_BGKD[0]

    def take(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cut the new rows off the cache's tensors."""
        assert self.key_GKD is not None
        assert self.value_GKD is not None
        key, value = self.key_GKD, self.value_GKD
        self.key_GKD = self.value_GKD = None
        return key[:, -num_rows:], value[:, -num_rows:], key


@dataclass
class WindowRows(Rows):
    """A sliding layer forgets: new rows are copied, and keys that the next rows see are kept."""

    keys: RowBuffer = field(default_factory=RowBuffer)
    values: RowBuffer = field(default_factory=RowBuffer)
    tail_GKD: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that wait."""
        return self.queries.num_bytes + self.keys.num_bytes + self.values.num_bytes

    def keep(self, call: AttentionCall, num_new: int) -> None:
        """Copy the new rows."""
        self.keys.append(call.key_BGKD[0, :, -num_new:])
        self.values.append(call.value_BGKD[0, :, -num_new:])

    def take(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Join the copies, after the keys that were there before."""
        del num_rows
        key, value = self.keys.joined(), self.values.joined()
        seen = key if self.tail_GKD is None else torch.cat([self.tail_GKD, key], dim=1)
        before = max(0, seen.shape[1] - ((self.layer.window or 1) - 1))
        self.keys, self.values, self.tail_GKD = RowBuffer(), RowBuffer(), seen[:, before:].clone()
        return key, value, seen
