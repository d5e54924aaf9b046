"""What each forward pass of a batch cost: time, device memory, and the cache it left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracekit.model.cache_bytes import LayerBytes


@dataclass(frozen=True)
class Pass:
    """One forward pass of a batch.

    Parameters
    ----------
    stop
        Columns that the batch has after it.
    num_columns
        Columns that it added.
    path
        ``prefill`` or ``decode``.
    wall_s
        Its time.
    device_bytes
        Memory allocated on the device after it; None on the CPU.
    layers
        What the cache held after it.
    """

    stop: int
    num_columns: int
    path: str
    wall_s: float
    device_bytes: int | None
    layers: list[LayerBytes]


@dataclass
class Passes:
    """The forward passes since the tables were last written.

    Parameters
    ----------
    batch_size
        Sequences of the batch, among which the cache is shared.
    """

    batch_size: int
    waiting: list[Pass] = field(default_factory=list)

    def add(self, one: Pass) -> None:
        """Add a pass."""
        self.waiting.append(one)

    def drop(self, stop: int) -> None:
        """Forget the passes that ended at or before column ``stop``."""
        self.waiting = [one for one in self.waiting if one.stop > stop]

    def kv_rows(self, pad: int, first: int, stop: int) -> dict[str, NDArray[np.int64]]:
        """Return columns of ``schema.KV`` for the passes that ended in columns ``first`` to ``stop``.

        Parameters
        ----------
        pad
            Columns of padding before the sequence: not its entries, not its bytes.
        first, stop
            Last columns of the passes, half open.
        """
        passes = self._ended(first, stop)
        shape = (len(passes), len(passes[0].layers) if passes else 0, 4)
        facts = np.array(
            [
                (layer.layer, layer.entries, layer.logical_bytes, layer.resident_bytes)
                for one in passes
                for layer in one.layers
            ],
            dtype=np.int64,
        ).reshape(shape)
        layer, entries, logical, resident = np.moveaxis(facts, -1, 0)
        columns = np.array([one.stop for one in passes], dtype=np.int64)[:, None]
        # A sliding layer has dropped its oldest columns, padding first.
        padding = np.where(entries > 0, np.clip(pad - (columns - entries), 0, None), 0)
        own = entries - padding
        return {
            "position": np.broadcast_to(columns - pad, own.shape).ravel(),
            "layer": layer.ravel(),
            "entries": own.ravel(),
            "logical_bytes": _share(logical, own, entries, self.batch_size).ravel(),
            "resident_bytes": (resident // self.batch_size).ravel(),
        }

    def step_columns(self, pad: int, first: int, stop: int) -> dict[str, list[Any]]:
        """Return the columns of ``schema.STEPS`` that belong to passes, for columns first to stop.

        Time and memory stand in the last row of a pass; inside a prefill they are null.
        """
        names = ("path", "wall_s", "kv_bytes", "device_bytes")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        for one in self.waiting:
            low, high = max(first, one.stop - one.num_columns), min(stop, one.stop)
            if low >= high:
                continue
            ends = high == one.stop
            kv_bytes = self._bytes_of(one, pad) if ends else None
            for name, value in zip(
                names[1:], (one.wall_s, kv_bytes, one.device_bytes), strict=True
            ):
                rows[name] += [None] * (high - low - 1) + [value if ends else None]
            rows["path"] += [one.path] * (high - low)
        return rows

    def _ended(self, first: int, stop: int) -> list[Pass]:
        return [one for one in self.waiting if first < one.stop <= stop and one.layers]

    def _bytes_of(self, one: Pass, pad: int) -> int:
        total = 0
        for layer in one.layers:
            padding = max(0, pad - (one.stop - layer.entries)) if layer.entries else 0
            own = layer.entries - padding if layer.entries else 1
            total += layer.logical_bytes * own // (self.batch_size * max(1, layer.entries))
        return total


def _share(
    num_bytes: NDArray[np.int64],
    own: NDArray[np.int64],
    entries: NDArray[np.int64],
    batch_size: int,
) -> NDArray[np.int64]:
    """Return a sequence's bytes: those of its own entries; of a state without entries, its part."""
    counted = np.where(entries > 0, own, 1)
    share: NDArray[np.int64] = num_bytes * counted // (batch_size * np.maximum(entries, 1))
    return share
