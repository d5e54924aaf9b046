"""New rows of one layer that wait to be written, and the keys that they see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from tracekit.model.tap import AttentionCall
    from tracekit.record.strips import Strips
    from tracekit.spec import LayerSpec


@dataclass(frozen=True)
class Taken:
    """Rows of one layer that are to be written, of all sequences of a batch.

    Parameters
    ----------
    first
        Column of the first row.
    query_BHTD, key_BGTD, value_BGTD
        What these rows brought.
    seen_BGKD
        All keys that they see, the last one at the last row's column.
    """

    first: int
    query_BHTD: torch.Tensor
    key_BGTD: torch.Tensor
    value_BGTD: torch.Tensor
    seen_BGKD: torch.Tensor

    @property
    def stop(self) -> int:
        """Column after the last row."""
        return self.first + self.query_BHTD.shape[2]


@dataclass
class Rows(ABC):
    """New rows of one layer that wait to be written, and the keys that they see.

    Parameters
    ----------
    layer
        The layer.
    strips
        Where single rows go until they are taken back.
    """

    layer: LayerSpec
    strips: Strips
    first: int = 0
    pieces: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes that wait here."""
        return sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits here."""
        return not self.pieces.get("query")

    def add(self, call: AttentionCall) -> None:
        """Let the rows of one call wait."""
        self.hold("query", call.query_BHQD)
        self.keep(call)

    def hold(self, name: str, rows: torch.Tensor) -> None:
        """Let rows [B, X, T, D] wait: many as they are, one in the strips."""
        if rows.shape[2] == 1:
            self.strips.put(self.layer.index, name, rows)
        else:
            self.take_back(name, [rows])

    def take_back(self, name: str, pieces: list[torch.Tensor]) -> None:
        """Append pieces, in order."""
        self.pieces.setdefault(name, []).extend(pieces)

    @abstractmethod
    def keep(self, call: AttentionCall) -> None:
        """Keep a call's new keys and values."""

    @abstractmethod
    def seen(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the waiting rows' keys and values, and all keys that they see."""

    def clear(self) -> Taken:
        """Return the rows, and forget them."""
        query = self.joined("query")
        taken = Taken(self.first, query, *self.seen(query.shape[2]))
        self.pieces = {}
        self.first = taken.stop
        return taken

    def joined(self, name: str) -> torch.Tensor:
        """Return the rows that wait under a name."""
        pieces = self.pieces[name]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


@final
@dataclass
class FullRows(Rows):
    """Every call of a full layer is given all keys so far: the last call's are enough."""

    key_BGKD: torch.Tensor | None = None
    value_BGKD: torch.Tensor | None = None

    def keep(self, call: AttentionCall) -> None:
        """Keep what the cache holds anyway."""
        self.key_BGKD, self.value_BGKD = call.key_BGKD, call.value_BGKD

    def seen(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cut the new rows off the cache's tensors."""
        assert self.key_BGKD is not None
        assert self.value_BGKD is not None
        key, value = self.key_BGKD, self.value_BGKD
        self.key_BGKD = self.value_BGKD = None
        return key[:, :, -num_rows:], value[:, :, -num_rows:], key


@final
@dataclass
class WindowRows(Rows):
    """A sliding layer forgets: new rows are copied, and keys that the next rows see are kept."""

    tail_BGKD: torch.Tensor | None = None

    def keep(self, call: AttentionCall) -> None:
        """Hold the new rows."""
        num_new = call.query_BHQD.shape[2]
        self.hold("key", call.key_BGKD[:, :, -num_new:])
        self.hold("value", call.value_BGKD[:, :, -num_new:])

    def seen(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Join the copies, after the keys that were there before."""
        del num_rows
        key, value = self.joined("key"), self.joined("value")
        seen = key if self.tail_BGKD is None else torch.cat([self.tail_BGKD, key], dim=2)
        before = max(0, seen.shape[2] - ((self.layer.window or 1) - 1))
        self.tail_BGKD = seen[:, :, before:].clone()
        return key, value, seen
