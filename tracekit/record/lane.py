"""One sequence of a batch: its part of each tensor, cut free of padding, on its way to the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.record.attention_stats import KeyTotals, attention_rows, num_entries
from tracekit.record.ragged import attention_table
from tracekit.record.residuals import RESIDUAL
from tracekit.record.steps import step_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tracekit.record.passes import Passes
    from tracekit.record.rows import Taken
    from tracekit.record.store import Store
    from tracekit.spec import LayerSpec

BLOCK_BYTES = 32 << 20
"""Tensors of one row group at most."""

NEVER = 1 << 62
"""Column at which a sequence ends while its end is not known."""


@dataclass
class Lane:
    """One sequence of a batch.

    Parameters
    ----------
    sequence_id
        Its id.
    number
        Its place in the batch.
    pad
        Columns of padding before it.
    store
        Where it goes.
    scored_from
        First position that counts.
    stop
        Column of its last token: rows from there on are not its own.
    first_bad
        Position and layer at which numbers first were not finite; None while all are.
    """

    sequence_id: str
    number: int
    pad: int
    store: Store
    scored_from: int = 1
    stop: int = NEVER
    first_bad: tuple[int, int] | None = None
    num_rows: int = 0
    _entropy: float = float("nan")
    _totals: dict[int, KeyTotals] = field(default_factory=dict)

    def attention(self, layer: LayerSpec, taken: Taken) -> None:
        """Write the rows of one layer: their tensors, and the statistics of their attention."""
        low, high = max(taken.first, self.pad), min(taken.stop, self.stop)
        if low >= high:
            return
        rows = slice(low - taken.first, high - taken.first)
        own = self.number
        query, key, value = (
            tensor[own, :, rows] for tensor in (taken.query_BHTD, taken.key_BGTD, taken.value_BGTD)
        )
        seen_first = taken.stop - taken.seen_BGKD.shape[2]
        first_seen = max(seen_first, self.pad)
        seen = taken.seen_BGKD[own, :, first_seen - seen_first : high - seen_first]
        self.note_bad(layer.index, low - self.pad, query, key, value)
        if self.store.with_tensors:
            self._put_tensors(layer, low - self.pad, query, key, value)
        totals = self._totals.get(layer.index)
        if totals is None:
            totals = KeyTotals.empty(layer.num_kv_heads, query.device)
            self._totals[layer.index] = totals
        columns = attention_rows(
            query,
            seen,
            layer,
            totals,
            first_query=low - self.pad,
            first_key=first_seen - self.pad,
            wanted=self.store.wanted,
        )
        self._put_attention(layer, low - self.pad, high - low, columns)

    def residual(self, layer: int, first: int, hidden_BTE: torch.Tensor) -> None:
        """Write the hidden states that left a layer, which stand in columns from ``first`` on."""
        low, high = max(first, self.pad), min(first + hidden_BTE.shape[1], self.stop)
        if low >= high:
            return
        own_TE = hidden_BTE[self.number, low - first : high - first]
        stored_TE = own_TE if self.store.dtype is None else own_TE.to(self.store.dtype)
        # Checked as stored: single numbers of a residual may be too large for float16.
        self.note_bad(layer, low - self.pad, stored_TE)
        size = max(1, BLOCK_BYTES // stored_TE[0].nbytes)
        for start in range(0, len(stored_TE), size):
            part_TE = stored_TE[start : start + size]
            self._put_blocks(layer, low - self.pad + start, {RESIDUAL: part_TE})

    def steps(
        self, first: int, hidden_TE: torch.Tensor, targets: Sequence[int], passes: Passes
    ) -> None:
        """Write the steps whose final hidden states stand in columns from ``first`` on.

        Parameters
        ----------
        first
            Column of the first row.
        hidden_TE
            Final hidden states.
        targets
            The token that came after each.
        passes
            That brought them.
        """
        if not len(targets):
            return
        position, count = first - self.pad, len(targets)
        self.note_bad(NEVER, position, hidden_TE)
        columns = step_columns(
            hidden_TE,
            targets,
            self.store.head,
            num_tokens=self.store.num_tokens,
            entropy_before=self._entropy,
        )
        self._entropy = float(columns["entropy_nats"][-1])
        self.num_rows += count
        predicted = np.arange(position + 1, position + count + 1)
        columns |= {
            "sequence_id": self.sequence_id,
            "position": predicted,
            "is_scored": predicted >= self.scored_from,
            "temperature": 1.0,
            **passes.step_columns(self.pad, first, first + count),
        }
        self._put_rows(schema.STEPS, count, columns)
        kv = passes.kv_rows(self.pad, first, first + count)
        self._put_rows(schema.KV, len(kv["position"]), {"sequence_id": self.sequence_id, **kv})
        if self.store.with_attention:
            self._put_blocks(-1, position, {"hidden": hidden_TE})

    def keys(self) -> None:
        """Write what each key has received, layer by layer."""
        for index, totals in self._totals.items():
            self._put_keys(index, totals)

    def note_bad(self, layer: int, first: int, *tensors: torch.Tensor) -> None:
        """Remember the earliest position, and there the lowest layer, that is not finite."""
        for tensor in tensors:
            if bool(tensor.isfinite().all()):
                continue
            is_bad_T = ~tensor.isfinite().all(-1).reshape(-1, tensor.shape[-2]).all(0)
            found = (first + int(is_bad_T.nonzero()[0]), layer)
            self.first_bad = found if self.first_bad is None else min(self.first_bad, found)

    def _put_tensors(self, layer: LayerSpec, first: int, *tensors: torch.Tensor) -> None:
        kinds = ("query", "key", "value") if layer.holds_keys else ("query",)
        row_bytes = sum(tensor[:, 0].nbytes for tensor in tensors)
        size = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, tensors[0].shape[1], size):
            parts = {
                kind: tensor[:, start : start + size]
                for kind, tensor in zip(kinds, tensors, strict=False)
            }
            if self.store.dtype is not None:
                parts = {kind: part.to(self.store.dtype) for kind, part in parts.items()}
            self._put_blocks(layer.index, first + start, parts)

    def _put_blocks(self, layer: int, first: int, tensors: dict[str, torch.Tensor]) -> None:
        arrival = self.store.transfer.fetch(tensors)

        def write() -> None:
            arrays = arrival.arrays()
            blocks = {kind: array for kind, (array, _) in arrays.items()}
            dtype = next(name for _, name in arrays.values())
            self.store.writer.shard.append_blocks(self.sequence_id, layer, first, blocks, dtype)

        self.store.outbox.put(write, arrival.num_bytes)

    def _put_attention(
        self, layer: LayerSpec, first: int, count: int, columns: dict[str, torch.Tensor]
    ) -> None:
        arrival = self.store.transfer.fetch(columns)
        entries = num_entries(layer, first, count)

        def write() -> None:
            arrays = {name: array for name, (array, _) in arrival.arrays().items()}
            rows = attention_table(arrays, entries, self.store.wanted.top_k)
            rows |= {
                "sequence_id": self.sequence_id,
                "layer": layer.index,
                "head": np.repeat(np.arange(layer.num_heads), count),
                "query": np.tile(np.arange(first, first + count), layer.num_heads),
            }
            shard = self.store.writer.shard
            shard.append(schema.ATTENTION, layer.num_heads * count, rows)

        self.store.outbox.put(write, arrival.num_bytes)

    def _put_keys(self, index: int, totals: KeyTotals) -> None:
        arrival = self.store.transfer.fetch(vars(totals))
        num_kv_heads, num_keys = totals.mass_GK.shape

        def write() -> None:
            arrays = {name: array.reshape(-1) for name, (array, _) in arrival.arrays().items()}
            last = arrays["last_GK"].astype(np.float64)
            columns = {
                "sequence_id": self.sequence_id,
                "layer": index,
                "kv_head": np.repeat(np.arange(num_kv_heads), num_keys),
                "key": np.tile(np.arange(num_keys), num_kv_heads),
                "mass_received": arrays["mass_GK"],
                "reads": arrays["reads_GK"],
                "last_read": np.where(last < 0, np.nan, last),
            }
            self.store.writer.shard.append(schema.KEYS, num_kv_heads * num_keys, columns)

        self.store.outbox.put(write, arrival.num_bytes)

    def _put_rows(self, table: schema.Table, count: int, columns: dict[str, Any]) -> None:
        num_bytes = 128 * count
        self.store.outbox.put(
            lambda: self.store.writer.shard.append(table, count, columns), num_bytes
        )
