"""What the forward passes of a batch show, taken as they run and written in blocks.

Only what cannot be derived later is kept: new queries, keys, values, hidden states.
Statistics are derived when a block is written, while its keys are at hand.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from tracekit.errors import ModelError
from tracekit.model.cache_bytes import cache_layers
from tracekit.model.read_spec import CHECK_GATES, check_attention
from tracekit.record.passes import Pass, Passes
from tracekit.record.residuals import RESIDUAL, Residuals
from tracekit.record.rows import FullRows, Rows, WindowRows
from tracekit.record.strips import Strips

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracekit.model.tap import AttentionCall, ForwardEnd
    from tracekit.record.lane import Lane
    from tracekit.spec import LayerSpec, ModelSpec

PENDING_BYTES = 64 << 20
"""Rows are written when so many bytes wait, over all layers and sequences."""

DEVICE_PENDING_BYTES = 512 << 20
"""The same on an accelerator."""

HIDDEN = (-1, "hidden")
"""Under which final hidden states wait."""

PENDING_PASSES = 1024
"""And after so many forward passes."""

CHECKED_PASSES = 8
"""Every so many steps it is looked how much waits."""

CHECKED_ROWS = 32
"""First rows of a batch on which each layer's attention is checked against the kernel's."""


class Capture:
    """Observer of the forward passes of one batch (see ``model.tap``).

    Parameters
    ----------
    spec
        Of the model.
    lanes
        The sequences of the batch, in its order.
    """

    def __init__(self, spec: ModelSpec, lanes: Sequence[Lane]) -> None:
        self._spec = spec
        self._lanes = list(lanes)
        self._store = lanes[0].store
        self._layers: dict[int, Rows] = {}
        self._strips = Strips()
        self._residuals = Residuals(self._strips)
        self._hidden: list[torch.Tensor] = []
        self._limit = PENDING_BYTES
        self._first_hidden = 0
        self._passes = Passes(len(lanes))
        self._ids_BC = torch.zeros(len(lanes), 0, dtype=torch.int64)
        self._num_columns = 0
        self._is_prefill = True
        self._clock = time.perf_counter()

    def begin(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Learn the ids of the prompts; the next forward passes read them."""
        self.told(ids_BC, stops)
        self._limit = PENDING_BYTES if ids_BC.device.type == "cpu" else DEVICE_PENDING_BYTES
        self._take_back()
        self._is_prefill = True
        self._clock = time.perf_counter()

    def told(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Learn all ids so far, and the columns at which sequences end."""
        self._ids_BC = ids_BC
        for lane, stop in zip(self._lanes, stops, strict=True):
            lane.stop = stop
        self._is_prefill = False

    @property
    def leaving(self) -> dict[int, Callable[[torch.Tensor], None]]:
        """Who is told of the hidden states that leave each layer, of those that are kept."""
        return {layer: partial(self.residual, layer) for layer in self._store.residual_layers}

    def residual(self, layer: int, hidden_BTE: torch.Tensor) -> None:
        """Take the hidden states that leave a layer."""
        self._residuals.add(layer, hidden_BTE)
        if hidden_BTE.nbytes >= self._limit // len(self._spec.layers):
            self._write_residual(layer)  # a long prompt: each layer is written as it comes

    def attention(self, call: AttentionCall) -> None:
        """Take the new rows of one layer's attention."""
        layer = self._spec.layers[call.layer]
        if not self._store.with_attention:
            self._look(call)
            return
        if layer.refusal is not None:
            return
        rows = self._layers.get(call.layer)
        if rows is None:
            self._check(call, layer)
            kind = FullRows if layer.window is None else WindowRows
            rows = self._layers[call.layer] = kind(layer, self._strips)
        rows.add(call)
        if call.query_BHQD.nbytes >= self._limit // len(self._spec.layers):
            self._write(rows)  # a long prompt: each layer is written as it comes

    def forward(self, end: ForwardEnd) -> None:
        """Take the final hidden states and the cache's size after one forward pass."""
        self._store.outbox.check()
        hidden_BTE = end.hidden_BTE.float()
        if hidden_BTE.shape[1] == 1:
            self._strips.put(*HIDDEN, hidden_BTE[:, None])
        else:
            self._hidden.append(hidden_BTE)
        self._strips.end_step()
        now = time.perf_counter()
        device, num_columns = end.hidden_BTE.device, end.hidden_BTE.shape[1]
        self._num_columns += num_columns
        self._passes.add(
            Pass(
                stop=self._num_columns,
                num_columns=num_columns,
                path="prefill" if self._is_prefill else "decode",
                wall_s=now - self._clock,
                device_bytes=(
                    torch.cuda.memory_allocated(device) if device.type == "cuda" else None
                ),
                layers=cache_layers(end.cache) if end.cache is not None else [],
            )
        )
        self._clock = now
        if num_columns > 1 or len(self._passes.waiting) % CHECKED_PASSES == 0:
            self._write_if_many()

    def _write_if_many(self) -> None:
        """Write what waits if it is much."""
        pending = self._strips.num_bytes + sum(piece.nbytes for piece in self._hidden)
        pending += sum(rows.num_bytes for rows in self._layers.values())
        pending += self._residuals.num_bytes
        if pending >= self._limit or len(self._passes.waiting) >= PENDING_PASSES:
            self._write_layers()
            self._write_steps([row.tolist() for row in self._ids_BC])

    def finish(self, ids: Sequence[Sequence[int]]) -> None:
        """Write what is left.

        Parameters
        ----------
        ids
            All ids of each sequence, without padding.
        """
        for lane, own in zip(self._lanes, ids, strict=True):
            lane.stop = lane.pad + len(own) - 1
        self._write_layers()
        self._write_steps(
            [[0] * lane.pad + list(own) for lane, own in zip(self._lanes, ids, strict=True)]
        )
        for lane in self._lanes:
            lane.keys()

    def _look(self, call: AttentionCall) -> None:
        """Where no tensor is kept, see that none overflows: only float16 does with sound weights."""
        if self._spec.dtype != "float16":
            return
        for lane in self._lanes:
            skipped = max(0, lane.pad - self._num_columns)
            query = call.query_BHQD[lane.number, :, skipped:]
            lane.note_bad(call.layer, self._num_columns + skipped - lane.pad, query)

    def _check(self, call: AttentionCall, layer: LayerSpec) -> None:
        """Compare recomputed and real attention of a layer's first rows (law 6)."""
        rows = min(CHECKED_ROWS, call.query_BHQD.shape[2])
        one = min(self._lanes, key=lambda lane: lane.pad).number
        own = slice(one, one + 1)
        first = replace(
            call,
            query_BHQD=call.query_BHQD[own, :, :rows],
            key_BGKD=call.key_BGKD[own, :, :rows],
            value_BGKD=call.value_BGKD[own, :, :rows],
            output_BQHD=call.output_BQHD[own, :rows],
            mask=None,
        )
        if not bool(first.output_BQHD.isfinite().all()):
            return  # the model overflowed: its sequences are left out by name
        error, gate = check_attention(first, layer), CHECK_GATES[self._spec.dtype]
        if not error <= gate:
            msg = (
                f"layer {layer.index} of {self._spec.name} does not attend as its spec says: the "
                f"recomputed output is off by {error:.1e} (relative, at most {gate:.0e} allowed)."
            )
            raise ModelError(msg)

    def _take_back(self) -> None:
        """Put the single rows behind those that came many at once."""
        for (layer, name), pieces in self._strips.take().items():
            if (layer, name) == HIDDEN:
                self._hidden += [piece[:, 0] for piece in pieces]
            elif name == RESIDUAL:
                self._residuals.take_back(layer, pieces)
            else:
                self._layers[layer].take_back(name, pieces)

    def _write_layers(self) -> None:
        self._take_back()
        for rows in self._layers.values():
            if not rows.is_empty:
                self._write(rows)
        for layer in self._residuals.waiting:
            self._write_residual(layer)

    def _write(self, rows: Rows) -> None:
        """Write a layer's waiting rows, each sequence's by itself."""
        taken = rows.clear()
        for lane in self._lanes:
            lane.attention(rows.layer, taken)

    def _write_residual(self, layer: int) -> None:
        """Write the hidden states of a layer that wait."""
        first, hidden_BTE = self._residuals.clear(layer)
        for lane in self._lanes:
            lane.residual(layer, first, hidden_BTE)

    def _write_steps(self, ids: Sequence[Sequence[int]]) -> None:
        """Write the steps whose tokens are known; ``ids`` have their columns of padding."""
        if not self._hidden:
            return
        hidden_BTE, first = torch.cat(self._hidden, dim=1), self._first_hidden
        known = max(len(own) for own in ids) - 1
        for lane, own in zip(self._lanes, ids, strict=True):
            low = max(first, lane.pad)
            high = min(first + hidden_BTE.shape[1], lane.stop, len(own) - 1)
            part = hidden_BTE[lane.number, low - first : max(low, high) - first]
            lane.steps(low, part, own[low + 1 : high + 1], self._passes)
        done = min(known - first, hidden_BTE.shape[1])
        self._hidden = [hidden_BTE[:, done:].clone()] if done < hidden_BTE.shape[1] else []
        self._first_hidden = first + done
        self._passes.drop(self._first_hidden)
