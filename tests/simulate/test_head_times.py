"""The rows of ``head_times``: what was timed, and the head's part of the model."""

from __future__ import annotations

import pytest
import torch

from tracekit import schema
from tracekit.errors import UsageError
from tracekit.measure.head import Head
from tracekit.simulate.head_times import head_times
from tracekit.spec import HeadSpec, ModelSpec

WIDTH, HIDDEN = 40, 6
HEAD_BYTES = 4 * WIDTH * HIDDEN


def model_spec(
    *, num_weight_bytes: int | None, num_embeddings: int | None = WIDTH, is_tied: bool = True
) -> ModelSpec:
    return ModelSpec(
        name="small",
        revision=None,
        model_type="none",
        fingerprint="",
        dtype="float32",
        layers=(),
        head=HeadSpec(num_rows=WIDTH, hidden_size=HIDDEN, is_tied=is_tied),
        ropes={},
        num_tokens=WIDTH,
        max_positions=None,
        attention="sdpa",
        num_embeddings=num_embeddings,
        num_weight_bytes=num_weight_bytes,
    )


def head_of(spec: ModelSpec) -> Head:
    return Head(torch.ones(WIDTH, HIDDEN), None, spec.head)


def test_the_columns_are_those_of_the_schema() -> None:
    spec = model_spec(num_weight_bytes=5 * HEAD_BYTES)
    columns = head_times(spec, head_of(spec), [3, 10])
    assert set(columns) == {column.name for column in schema.HEAD_TIMES.columns}
    table = schema.HEAD_TIMES.build(len(columns["size"]), columns)
    assert table["batch"].to_pylist() == [1, 1, 8, 8]
    assert table["size"].to_pylist() == [3, 10, 3, 10]
    assert not any(table[name].null_count for name in table.column_names)
    assert table["head_share"].to_pylist() == [0.2] * 4
    assert table["ceiling_free"].to_pylist() == pytest.approx([1.25] * 4)


def test_a_model_of_unknown_size_has_times_but_no_ceiling() -> None:
    spec = model_spec(num_weight_bytes=None)
    table = schema.HEAD_TIMES.build(2, head_times(spec, head_of(spec), [3]))
    assert table["head_share"].null_count == table["ceiling_free"].null_count == 2
    assert table["full_s"].null_count == 0


def test_an_input_embedding_of_its_own_is_read_one_row_a_step() -> None:
    row_bytes, other_bytes = 4 * HIDDEN, 3 * HEAD_BYTES
    weight_bytes = other_bytes + HEAD_BYTES + 50 * row_bytes
    spec = model_spec(num_weight_bytes=weight_bytes, num_embeddings=50, is_tied=False)
    columns = head_times(spec, head_of(spec), [3])
    assert columns["head_share"] == HEAD_BYTES / (other_bytes + HEAD_BYTES + row_bytes)


def test_sizes_above_the_vocabulary_are_one_row_a_batch() -> None:
    spec = model_spec(num_weight_bytes=None)
    assert head_times(spec, head_of(spec), [WIDTH, 99])["size"] == [WIDTH, WIDTH]


def test_a_size_of_nothing_is_refused() -> None:
    spec = model_spec(num_weight_bytes=None)
    with pytest.raises(UsageError, match="sizes to be timed"):
        head_times(spec, head_of(spec), [0])
