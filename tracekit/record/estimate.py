"""How large a trace will be, before anything is recorded.

Tensors and weights are counted; tables are rows times bytes measured on a real trace, to within
``TABLE_FACTOR``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.trace import layout
from tracekit.trace.writer import SHARD_BYTES, SHARD_SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tracekit.record.probe_options import ProbeOptions
    from tracekit.spec import LayerSpec, ModelSpec

TABLE_FACTOR = 1.5
"""Tables are within this factor of their estimate, for text like the calibration's."""

ROW_BYTES = {"tokens": 6.3, "steps": 158.0, "kv": 0.05, "attention": 17.2, "keys": 6.3}
"""Compressed bytes of a row: SmolLM2-135M on 16 prompts of ``core``, 64 new tokens each, native
float32, schema version 1. A row of ``attention`` is five random float32, of which zstd takes off a
sixth (more in layers of small windows); ids and positions nearly vanish."""

ENTRY_BYTES, MAP_KEY_BYTES = 5, 2
"""What a row of ``attention`` has on top: each of its largest entries, an int32 and a float32 whose
8 bytes shrink to 4.7 (three prompts of ``core``, 16 entries); each key of a map, float16, as it is."""

PASS_BYTES = 16
"""What a forward pass adds to ``kv``, whose rows repeat from layer to layer."""

SEQUENCE_BYTES, TEXT_BYTES_PER_TOKEN = 300, 5.0
"""A row of ``sequences``: what it has beside its texts, and its texts, compressed."""

VOCAB_ROW_BYTES = 18.7
"""A row of ``vocab.parquet``, of SmolLM2's 49 152."""

COLUMN_FILE_BYTES, COLUMN_GROUP_BYTES = 285, 125
"""What Parquet adds a column: its schema and our unit and meaning, once a file; the headers of its
pages and its place in the footer, once a row group."""

LISTING_BYTES = 1800
"""Names, sizes and checksums of the other files, in the footer of ``sequences.parquet``."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Length:
    """Tokens of one sequence: given ones and those to be generated, over all turns.

    ``num_probed`` of its rows have influence probes.
    """

    num_prompt: int
    num_new: int
    num_probed: int = 0

    @property
    def num_rows(self) -> int:
        """Positions that go through the model: all but the last."""
        return max(0, self.num_prompt + self.num_new - 1)

    @property
    def num_passes(self) -> int:
        """Forward passes, the prompt taken as one: the chunks of a long one hardly count."""
        return max(1, self.num_new)


def estimate_bytes(
    spec: ModelSpec,
    lengths: Sequence[Length],
    *,
    capture: str,
    dtype_store: str,
    head: str,
    store_oproj: bool = False,
    maps: Collection[int] = (),
    attention_topk: int = 0,
    residual_layers: Collection[int] = (),
    probes: ProbeOptions | None = None,
) -> dict[str, int]:
    """Return the bytes of a trace, by file; shards are added up.

    Parameters
    ----------
    spec
        Of the model.
    lengths
        One a sequence; generated answers are taken as long as they may be.
    capture, dtype_store, head, store_oproj
        As in ``RecordOptions``; a projection is taken to be found in each layer, without a bias.
    maps
        Layers whose maps are stored.
    attention_topk
        Largest entries that are stored of each row.
    residual_layers
        Layers whose outgoing hidden states are stored, taken to be of the model's type.
    probes
        Influence probes; None for none.

    Returns
    -------
    dict
        By file name. Tensors and weights are exact but for a few bytes of headers; other tables
        are within ``TABLE_FACTOR``.
    """
    seen = [layer for layer in spec.layers if layer.num_heads and layer.refusal is None]
    found = {layout.VOCABULARY: _table_bytes(schema.VOCAB, VOCAB_ROW_BYTES * spec.head.num_rows)}
    matrices = [_head_numbers(spec)] * (head == "store")
    matrices += [_projection_numbers(spec, seen)] * store_oproj
    if matrices:
        found[layout.WEIGHTS] = sum(matrices) * ITEM_BYTES[spec.dtype]
    data = dict.fromkeys(_names(seen, capture), 0.0)
    stored = seen if layout.holds(capture, "qkv") else []
    item_bytes = ITEM_BYTES[spec.dtype if dtype_store == "native" else dtype_store]
    residual_bytes = len(residual_layers) * spec.head.hidden_size * item_bytes
    probed = [spec.layers[at] for at in probes.chosen(spec)] if probes else []
    for one in lengths:
        for name, count in _num_rows(spec, seen, one).items():
            if name in data:
                data[name] += ROW_BYTES[name] * count
        data["kv"] += PASS_BYTES * one.num_passes
        if "attention" in data:
            data["attention"] += _entries_bytes(seen, one.num_rows, set(maps), attention_topk)
        if "tensors" in data:
            data["tensors"] += _tensor_bytes(spec, stored, one.num_rows, item_bytes)
            data["tensors"] += one.num_rows * residual_bytes
        if probes:
            data["tensors"] += one.num_probed * _probe_bytes(probed, probes)
    tokens = sum(one.num_prompt + one.num_new for one in lengths)
    texts = SEQUENCE_BYTES * len(lengths) + TEXT_BYTES_PER_TOKEN * tokens
    num_groups = len(lengths) * (len(stored) + len(residual_layers))
    num_groups += len(probed) * sum(one.num_probed > 0 for one in lengths)
    return found | _shard_bytes(data, texts, len(lengths), num_groups)


def _names(seen: Sequence[LayerSpec], capture: str) -> list[str]:
    """Return the tables that a capture level has, ``sequences`` aside."""
    names = ["tokens", "steps", "kv"]
    if capture != "steps":
        names += [*(["attention", "keys"] if seen else []), "tensors"]
    return names


def _num_rows(spec: ModelSpec, seen: Sequence[LayerSpec], one: Length) -> dict[str, int]:
    """Return the rows of one sequence in each table of ``ROW_BYTES``."""
    return {
        "tokens": one.num_prompt + one.num_new,
        "steps": one.num_rows,
        "kv": one.num_passes * sum(layer.holds_keys for layer in spec.layers),
        "attention": one.num_rows * sum(layer.num_heads for layer in seen),
        "keys": one.num_rows * sum(layer.num_kv_heads for layer in seen),
    }


def _head_numbers(spec: ModelSpec) -> int:
    """Return the numbers of the head, its bias, the final norm and, untied, the embedding."""
    head = spec.head
    matrices = 1 if head.is_tied else 2
    return head.num_rows * (matrices * head.hidden_size + head.has_bias) + head.hidden_size


def _projection_numbers(spec: ModelSpec, seen: Sequence[LayerSpec]) -> int:
    """Return the numbers of the output projections of layers."""
    return spec.head.hidden_size * sum(layer.num_heads * layer.value_dim for layer in seen)


def _tensor_bytes(
    spec: ModelSpec, stored: Sequence[LayerSpec], num_rows: int, item_bytes: int
) -> float:
    """Return the bytes of final hidden states, and of stored layers' queries, keys and values."""
    numbers = sum(layer.num_heads * layer.head_dim + layer.numbers_per_token for layer in stored)
    return num_rows * (4 * spec.head.hidden_size + item_bytes * numbers)


def _probe_bytes(probed: Sequence[LayerSpec], probes: ProbeOptions) -> int:
    """Return the bytes of all probes of one row."""
    numbers = sum(layer.num_heads * layer.value_dim for layer in probed)
    return probes.number * numbers * ITEM_BYTES[probes.dtype]


def _entries_bytes(
    seen: Sequence[LayerSpec], num_rows: int, maps: set[int], attention_topk: int
) -> float:
    """Return the bytes of one sequence's maps and largest entries."""
    total = 0
    for layer in seen:
        full = min(num_rows, layer.window or num_rows)
        visible = full * (full + 1) // 2 + (num_rows - full) * full
        if layer.index in maps:
            total += MAP_KEY_BYTES * layer.num_heads * visible
        total += ENTRY_BYTES * attention_topk * layer.num_heads * num_rows
    return total


def _shard_bytes(
    data: dict[str, float], texts: float, num_sequences: int, num_groups: int
) -> dict[str, int]:
    """Return the bytes of the files of all shards, Parquet's own included."""
    if not num_sequences:
        return {}
    tables = {table.name: table for table in schema.SHARD_TABLES}
    by_size = math.ceil(sum(data.values()) / SHARD_BYTES)
    num_shards = min(num_sequences, max(by_size, math.ceil(num_sequences / SHARD_SEQUENCES)))
    found = {
        f"{name}.parquet": _table_bytes(
            tables[name],
            size,
            num_files=num_shards,
            # Tensors: a row group for each layer, and one for the final hidden states.
            num_groups=num_sequences + (num_groups if name == "tensors" else 0),
        )
        for name, size in data.items()
    }
    size = _table_bytes(schema.SEQUENCES, texts, num_files=num_shards, num_groups=num_shards)
    return found | {"sequences.parquet": size + num_shards * LISTING_BYTES}


def _table_bytes(
    table: schema.Table, data_bytes: float, *, num_files: int = 1, num_groups: int = 1
) -> int:
    """Return the bytes of a table's files: data and what Parquet adds."""
    added = COLUMN_FILE_BYTES * num_files + COLUMN_GROUP_BYTES * num_groups
    return round(data_bytes + added * len(table.columns))
