"""What one sequence's forward passes show, taken as they run and written in blocks.

Only what cannot be derived later is kept: new queries, keys, values, and final hidden states. The
attention statistics are derived when a block is written, while its keys are at hand.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit import schema
from tracekit.errors import ModelError
from tracekit.measure.tensors import to_numpy
from tracekit.model.cache_bytes import cache_layers
from tracekit.model.read_spec import CHECK_GATES, check_attention
from tracekit.record.attention_stats import KeyTotals, attention_rows
from tracekit.record.buffer import RowBuffer
from tracekit.record.rows import FullRows, Rows, WindowRows

if TYPE_CHECKING:
    from tracekit.model.tap import AttentionCall, ForwardEnd
    from tracekit.spec import LayerSpec, ModelSpec
    from tracekit.trace.shard import Shard

PENDING_BYTES = 64 << 20
"""Rows are written when so many bytes wait, over all layers."""

BLOCK_BYTES = 32 << 20
"""Queries, keys and values of one row group at most."""

CHECKED_ROWS = 32
"""First rows of a sequence on which each layer's attention is checked against the kernel's."""


class Capture:
    """Observer of the forward passes of one sequence (see ``model.tap``).

    Parameters
    ----------
    sequence_id
        Its id.
    spec
        Of the model.
    shard
        Where rows go.
    with_attention, with_tensors
        What the capture level asks for: statistics of attention; queries, keys, values.
    dtype
        Type in which tensors are stored; None: as computed.
    """

    def __init__(
        self,
        sequence_id: str,
        spec: ModelSpec,
        shard: Shard,
        *,
        with_attention: bool,
        with_tensors: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self._id = sequence_id
        self._spec = spec
        self._shard = shard
        self._with_attention = with_attention
        self._with_tensors = with_tensors
        self._dtype = dtype
        self._layers: dict[int, Rows] = {}
        self._hidden = RowBuffer()
        self._passes: list[dict[str, Any]] = []
        self._cache_rows: list[tuple[int, int, int, int, int]] = []
        self._is_prefill = True
        self._clock = time.perf_counter()

    @property
    def num_rows(self) -> int:
        """Positions that went through the model."""
        return self._hidden.num_rows

    @property
    def hidden_TE(self) -> torch.Tensor:
        """Final hidden states, float32, on the model's device."""
        return self._hidden.joined()

    def begin_turn(self) -> None:
        """Tell that the next forward pass reads a prompt."""
        self._is_prefill = True
        self._clock = time.perf_counter()

    def attention(self, call: AttentionCall) -> None:
        """Take the new rows of one layer's attention."""
        layer = self._spec.layers[call.layer]
        if layer.refusal is not None or not self._with_attention:
            return
        if call.query_BHQD.shape[0] != 1:
            msg = "a sequence is recorded alone: the batch size must be 1."
            raise ModelError(msg)
        rows = self._layers.get(call.layer)
        if rows is None:
            self._check(call, layer)
            kind = FullRows if layer.window is None else WindowRows
            rows = self._layers[call.layer] = kind(layer, KeyTotals.empty(layer.num_kv_heads))
        rows.add(call)
        if call.query_BHQD.nbytes >= PENDING_BYTES // len(self._spec.layers):
            self._write(rows)  # a long prompt: each layer is written as it comes

    def forward(self, end: ForwardEnd) -> None:
        """Take the final hidden states and the cache's size after one forward pass."""
        self._hidden.append(end.hidden_BTE[0].float())
        now = time.perf_counter()
        layers = cache_layers(end.cache) if end.cache is not None else []
        position = self.num_rows
        self._cache_rows += [
            (position, one.layer, one.entries, one.logical_bytes, one.resident_bytes)
            for one in layers
        ]
        device = end.hidden_BTE.device
        self._passes.append(
            {
                "num_rows": end.hidden_BTE.shape[1],
                "path": "prefill" if self._is_prefill else "decode",
                "wall_s": now - self._clock,
                "kv_bytes": sum(one.logical_bytes for one in layers),
                "device_bytes": (
                    torch.cuda.memory_allocated(device) if device.type == "cuda" else None
                ),
            }
        )
        self._is_prefill = False
        self._clock = now
        if sum(rows.num_bytes for rows in self._layers.values()) >= PENDING_BYTES:
            self._write_all()

    def finish(self) -> None:
        """Write what is left: tensors, attention, keys, cache sizes, final hidden states."""
        self._write_all()
        for index, rows in self._layers.items():
            self._write_keys(index, rows.totals)
        names = ("position", "layer", "entries", "logical_bytes", "resident_bytes")
        columns = dict(
            zip(names, np.array(self._cache_rows, np.int64).reshape(-1, 5).T, strict=True)
        )
        self._shard.append(schema.KV, len(self._cache_rows), {"sequence_id": self._id, **columns})

    def write_hidden(self) -> None:
        """Write the final hidden states, always float32."""
        hidden, dtype = to_numpy(self.hidden_TE)
        self._shard.append_blocks(self._id, -1, 0, {"hidden": hidden}, dtype)

    def pass_columns(self) -> dict[str, Any]:
        """Return the columns of ``schema.STEPS`` that belong to forward passes, one row a step.

        Time and memory stand in the last row of a pass; inside a prefill they are null.
        """
        columns: dict[str, list[Any]] = {
            name: [] for name in ("path", "wall_s", "kv_bytes", "device_bytes")
        }
        for one in self._passes:
            inner = one["num_rows"] - 1
            columns["path"] += [one["path"]] * one["num_rows"]
            for name in ("wall_s", "kv_bytes", "device_bytes"):
                columns[name] += [None] * inner + [one[name]]
        return columns

    def _check(self, call: AttentionCall, layer: LayerSpec) -> None:
        """Compare recomputed and real attention of a layer's first rows (law 6)."""
        rows = min(CHECKED_ROWS, call.query_BHQD.shape[2])
        first = replace(
            call,
            query_BHQD=call.query_BHQD[:, :, :rows],
            key_BGKD=call.key_BGKD[:, :, :rows],
            value_BGKD=call.value_BGKD[:, :, :rows],
            output_BQHD=call.output_BQHD[:, :rows],
            mask=None,
        )
        error, gate = check_attention(first, layer), CHECK_GATES[self._spec.dtype]
        if not error <= gate:
            msg = (
                f"layer {layer.index} of {self._spec.name} does not attend as its spec says: the "
                f"recomputed output is off by {error:.1e} (relative, at most {gate:.0e} allowed)."
            )
            raise ModelError(msg)

    def _write_all(self) -> None:
        for rows in self._layers.values():
            if rows.queries.num_rows:
                self._write(rows)

    def _write(self, rows: Rows) -> None:
        """Write a layer's waiting rows: their tensors, and the statistics of their attention."""
        first = rows.first
        query, key, value, seen = rows.clear()
        self._write_tensors(rows.layer, first, query, key, value)
        columns = attention_rows(
            query,
            seen,
            rows.layer,
            rows.totals,
            first_query=first,
            first_key=first + query.shape[1] - seen.shape[1],
        )
        self._write_attention(rows.layer, first, query.shape[1], columns)

    def _write_tensors(self, layer: LayerSpec, first: int, *tensors: torch.Tensor) -> None:
        if not self._with_tensors:
            return
        kinds = ("query", "key", "value") if layer.holds_keys else ("query",)
        row_bytes = sum(tensor[:, 0].nbytes for tensor in tensors)
        size = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, tensors[0].shape[1], size):
            blocks = {}
            for kind, tensor in zip(kinds, tensors, strict=False):
                part = tensor[:, start : start + size]
                blocks[kind], dtype = to_numpy(
                    part if self._dtype is None else part.to(self._dtype)
                )
            self._shard.append_blocks(self._id, layer.index, first + start, blocks, dtype)

    def _write_attention(
        self, layer: LayerSpec, first: int, num_rows: int, rows: dict[str, np.ndarray]
    ) -> None:
        size = layer.num_heads * num_rows
        columns: dict[str, Any] = {name: values.reshape(-1) for name, values in rows.items()}
        columns["sequence_id"] = self._id
        columns["layer"] = layer.index
        columns["head"] = np.repeat(np.arange(layer.num_heads), num_rows)
        columns["query"] = np.tile(np.arange(first, first + num_rows), layer.num_heads)
        self._shard.append(schema.ATTENTION, size, columns)

    def _write_keys(self, index: int, totals: KeyTotals) -> None:
        num_kv_heads, num_keys = totals.mass_GK.shape
        last = totals.last_GK.reshape(-1).astype(np.float64)
        columns = {
            "sequence_id": self._id,
            "layer": index,
            "kv_head": np.repeat(np.arange(num_kv_heads), num_keys),
            "key": np.tile(np.arange(num_keys), num_kv_heads),
            "mass_received": totals.mass_GK.reshape(-1),
            "reads": totals.reads_GK.reshape(-1),
            "last_read": np.where(last < 0, np.nan, last),
        }
        self._shard.append(schema.KEYS, num_kv_heads * num_keys, columns)
