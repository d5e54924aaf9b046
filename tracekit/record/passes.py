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
        passes = [one for one in self.waiting if first < one.stop <= stop and one.layers]
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
        # A state without entries is shared evenly.
        counted, whole = np.where(entries > 0, own, 1), np.maximum(entries, 1)
        return {
            "position": np.broadcast_to(columns - pad, own.shape).ravel(),
            "layer": layer.ravel(),
            "entries": own.ravel(),
            "logical_bytes": (logical * counted // (self.batch_size * whole)).ravel(),
            "resident_bytes": (resident // self.batch_size).ravel(),
        }

    def step_columns(self, pad: int, first: int, stop: int) -> dict[str, list[Any]]:
        """Return the columns of ``schema.STEPS`` that belong to passes, for columns first to stop.

        Time and memory stand in the last row of a pass; inside a prefill they are null.
        """
        kv = self.kv_rows(pad, first, stop)
        totals = np.bincount(kv["position"], kv["logical_bytes"], minlength=stop - pad + 1)
        names = ("path", "wall_s", "kv_bytes", "device_bytes")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        for one in self.waiting:
            low, high = max(first, one.stop - one.num_columns), min(stop, one.stop)
            if low >= high:
                continue
            ends = high == one.stop
            last = (one.wall_s, int(totals[high - pad]), one.device_bytes)
            for name, value in zip(names[1:], last, strict=True):
                rows[name] += [None] * (high - low - 1) + [value if ends else None]
            rows["path"] += [one.path] * (high - low)
        return rows
