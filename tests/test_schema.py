from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tracekit import schema
from tracekit.spec import HeadSpec, LayerSpec, ModelSpec


@pytest.mark.parametrize("table", schema.SHARD_TABLES + schema.RESULT_TABLES + schema.ASKED_TABLES)
def test_every_column_says_what_it_means_and_is_named_once(table: schema.Table) -> None:
    names = [column.name for column in table.columns]
    assert len(names) == len(set(names))
    assert all(column.meaning for column in table.columns)


def test_nan_becomes_null_and_single_values_are_repeated() -> None:
    rows = schema.STEPS.build(
        2,
        {
            "sequence_id": "a#0",
            "entropy_nats": np.array([np.nan, 1.0]),
            "top_ids": np.array([[1, 2], [3, 4]]),
        },
    )
    assert rows["entropy_nats"].to_pylist() == [None, 1.0]
    assert rows["sequence_id"].to_pylist() == ["a#0", "a#0"]
    assert rows["top_ids"].to_pylist() == [[1, 2], [3, 4]]
    assert rows["rank"].null_count == 2


def test_no_rows_make_an_empty_table_of_the_same_schema() -> None:
    rows = schema.STEPS.build(0, {"sequence_id": "a", "top_ids": np.zeros((0, 3), np.int32)})
    assert rows.schema.equals(schema.STEPS.schema)
    assert rows.num_rows == 0


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(KeyError, match="no column entropy_bits"):
        schema.STEPS.build(1, {"entropy_bits": 1.0})


def test_units_travel_with_the_file() -> None:
    field = schema.STEPS.schema.field("entropy_nats")
    assert field.metadata[b"unit"] == b"nats"
    assert field.type == pa.float32()


def test_the_often_quoted_cache_of_64k_tokens_is_21_5_gb() -> None:
    layers = tuple(
        LayerSpec(index=i, kind="full", num_heads=40, num_kv_heads=40, head_dim=64, value_dim=64)
        for i in range(32)
    )
    spec = ModelSpec(
        name="b1",
        revision=None,
        model_type="none",
        fingerprint="",
        dtype="float16",
        layers=layers,
        head=HeadSpec(num_rows=1, hidden_size=1),
        ropes={},
        num_tokens=1,
        max_positions=None,
        attention="sdpa",
    )
    assert spec.kv_bytes(65536) == 2 * 32 * 40 * 64 * 65536 * 2 == 21_474_836_480


def test_a_sliding_layer_holds_its_window_at_most() -> None:
    layer = LayerSpec(
        index=0, kind="sliding", num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4, window=8
    )
    assert [layer.entries(n) for n in (1, 8, 20)] == [1, 8, 8]
