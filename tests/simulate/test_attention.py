"""Attention statistics of whole sequences against loops, on made-up and on recorded traces."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import architectures, oracles_attention, tiny
from tests.oracles_attention import SlowLayer
from tracekit import schema
from tracekit.errors import TraceError, UsageError
from tracekit.measure.attention_shape import FIRST_KEYS, MASS_PERCENT, NEWEST_KEYS, TOP_PERCENT
from tracekit.simulate.attention import ROW_QUANTILE, attention_rows
from tracekit.simulate.recommend import recommend
from tracekit.spec import LayerSpec
from tracekit.trace.reader import Block, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZE = 4
PATH = "nowhere"


@dataclass(frozen=True)
class Spec:
    layers: tuple[LayerSpec, ...]


@dataclass(frozen=True)
class MadeUp:
    """A trace of one sequence in memory, in float64 or bfloat16."""

    spec: Spec
    arrays: dict[int, dict[str, np.ndarray]]
    dtype: str = "float64"
    capture: str = "qkv"
    path: str = PATH

    def stored_layers(self, sequence_id: str) -> list[int]:
        return sorted(self.arrays)

    def attention_inputs(self, sequence_id: str, layer: int) -> dict[str, Block]:
        return {kind: Block(data, self.dtype) for kind, data in self.arrays[layer].items()}


def make_layer(index: int = 0, *, groups: int = 2, group_size: int = 2, **spec: Any) -> LayerSpec:
    return LayerSpec(
        index=index,
        kind="sliding" if spec.get("window") else "full",
        num_heads=groups * group_size,
        num_kv_heads=groups,
        head_dim=SIZE,
        value_dim=SIZE,
        **spec,
    )


def make_trace(layers: Sequence[LayerSpec], num_rows: int, seed: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    arrays = {
        one.index: {
            "query": draw.normal(size=(one.num_heads, num_rows, SIZE)),
            "key": draw.normal(size=(one.num_kv_heads, num_rows, SIZE)),
        }
        for one in layers
    }
    return MadeUp(Spec(tuple(layers)), arrays)


def make_sequence(
    num_tokens: int, prompt_end: int | None = None, scored_from: int = 1
) -> pd.Series[Any]:
    return pd.Series(
        {
            "sequence_id": "one#0",
            "domain": "story",
            "num_tokens": num_tokens,
            "prompt_end": prompt_end,
            "scored_from": scored_from,
        },
        dtype=object,
    )


def measured(trace: Any, sequence: pd.Series[Any], **how: Any) -> Any:
    frame = attention_rows(trace, sequence, **how).to_pandas()
    return frame.set_index(["layer", "kv_head"])


def slow_layer(trace: Any, layer: LayerSpec, first_row: int, name: str = "one#0") -> SlowLayer:
    blocks = trace.attention_inputs(name, layer.index)
    query, key = (blocks[kind].data.astype(np.float64) for kind in ("query", "key"))
    return SlowLayer(layer, query, key, first_row)


def same(found: Any, expected: float | None, name: str, rtol: float = 1e-5) -> None:
    wanted = math.nan if expected is None else expected
    np.testing.assert_allclose(float(found), wanted, rtol=rtol, atol=1e-6, err_msg=name)


def check_layer(frame: Any, slow: SlowLayer, point: int, later_row: int, share: float) -> None:
    """Compare all rows of one layer with the twin's."""
    for kv_head in slow.heads:
        row = frame.loc[(slow.layer.index, kv_head)]
        assert row["num_scored"] == len(slow.times)
        for name, value in slow.shapes(kv_head).items():
            same(row[name], value, name)
        np.testing.assert_allclose(
            row["distance_mass"], slow.distance_mass(kv_head), rtol=1e-5, atol=1e-7
        )
        lags, curve = slow.curve(kv_head)
        if lags:
            assert row["overlap_lags"].tolist() == lags
            np.testing.assert_allclose(row["overlap"], curve, rtol=1e-5)
            half_life = oracles_attention.half_life(lags, curve)
            same(row["half_life_rows"], half_life, "half_life_rows", 1e-3)
        else:
            assert row["overlap"] is None
        same(row["group_jaccard"], slow.group_jaccard(kv_head), "group_jaccard")
        same(row["kv_head_jaccard"], slow.kv_head_jaccard(kv_head), "kv_head_jaccard")
        if not slow.old(point) or later_row > slow.times[-1]:
            assert row[["point", "row_variance", "needed_frac_95", "oracle_frac_95"]].isna().all()
            continue
        assert (row["point"], row["point_keys"]) == (point, len(slow.old(point)))
        same(row["row_variance"], slow.row_variance(kv_head, point, later_row), "row_variance")
        for percent in MASS_PERCENT:
            for kind, protect in (("needed", True), ("oracle", False)):
                value = slow.needed_frac(kv_head, point, later_row, percent, share, protect=protect)
                same(row[f"{kind}_frac_{percent}"], value, kind)


@settings(max_examples=60)
@given(data=st.data())
def test_every_number_is_that_of_loops_over_heads_rows_and_keys(data: st.DataObject) -> None:
    groups, group_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    num_rows = data.draw(st.integers(1, 34))
    shapes: dict[str, Any] = {
        "groups": groups,
        "group_size": group_size,
        "scale": data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        "softcap": data.draw(st.none() | st.just(3.0)),
        "sinks": data.draw(st.none() | st.just((0.5,) * (groups * group_size))),
    }
    layers = [
        make_layer(index, window=data.draw(st.none() | st.integers(1, 20)), **shapes)
        for index in range(data.draw(st.integers(1, 2)))
    ]
    num_tokens = num_rows + data.draw(st.integers(0, 1))
    prompt_end = data.draw(st.none() | st.integers(1, num_rows))
    scored_from = data.draw(st.integers(1, num_rows)) if prompt_end is None else 1
    share = data.draw(st.sampled_from([0.5, 0.9, 1.0]))
    trace = make_trace(layers, num_rows, data.draw(st.integers(0, 99)))
    frame = measured(trace, make_sequence(num_tokens, prompt_end, scored_from), row_quantile=share)
    first_row = prompt_end or scored_from - 1
    point = num_tokens // 2 if prompt_end is None else prompt_end
    if first_row >= num_rows:
        assert frame.empty
        return
    slow = [slow_layer(trace, one, first_row) for one in layers]
    assert len(frame) == len(layers) * (groups + 1)
    for one in slow:
        check_layer(frame, one, point, max(point, first_row), share)
    for one, above in pairwise(slow):
        tops = [layer.tops(layer.heads[-1]) for layer in (one, above)]
        num = min(map(len, tops))
        pairs = zip(tops[0][-num:], tops[1][-num:], strict=True) if num else ()
        values = [oracles_attention.jaccard(*pair) for pair in pairs]
        expected = sum(values) / num if num else None
        found = frame.loc[(one.layer.index, schema.ALL), "next_layer_jaccard"]
        same(found, expected, "next_layer_jaccard")
    heads = frame.index.get_level_values("kv_head") >= 0
    assert frame.loc[heads, "next_layer_jaccard"].isna().all()


@pytest.mark.parametrize("prompt_end", [None, 40])
@pytest.mark.parametrize("window", [None, 30])
def test_heads_of_a_group_share_the_set_that_serves_their_sum(
    prompt_end: int | None, window: int | None
) -> None:
    layer = make_layer(group_size=3, window=window)
    trace, point = make_trace([layer], 60, seed=1), prompt_end or 30
    frame = measured(trace, make_sequence(61, prompt_end))
    check_layer(frame, slow_layer(trace, layer, prompt_end or 0), point, point, ROW_QUANTILE)


def test_the_columns_of_the_schema_are_those_that_are_measured() -> None:
    names = {column.name for column in schema.ATTENTION_RESULTS.columns}
    for prefix, numbers, suffix in (
        ("keys", MASS_PERCENT, ""),
        ("keys", MASS_PERCENT, "_frac"),
        ("needed_frac", MASS_PERCENT, ""),
        ("oracle_frac", MASS_PERCENT, ""),
        ("top", TOP_PERCENT, "_mass"),
        ("first", FIRST_KEYS, "_mass"),
        ("newest", NEWEST_KEYS, "_mass"),
    ):
        assert {f"{prefix}_{number}{suffix}" for number in numbers} <= names
    assert all(
        column.meaning
        for table in (schema.ATTENTION_RESULTS, schema.RECOMMENDED)
        for column in table.columns
    )


def test_one_token_has_one_row_a_head_and_nothing_to_evict() -> None:
    frame = measured(make_trace([make_layer(groups=1, group_size=1)], 1), make_sequence(1))
    assert len(frame) == 2
    assert (frame["keys_95"] == 1).all()
    assert (frame["entropy_nats"] == 0).all()
    assert frame[["entropy_frac", "needed_frac_95", "point"]].isna().all().all()
    assert [one.tolist() for one in frame["distance_mass"]] == [[0.0]] * 2
    assert (frame["first_1_mass"] == 1).all()
    assert recommend(frame.reset_index(), seed=0)["layer"] == []


def test_a_sequence_without_rows_after_its_prompt_has_no_rows() -> None:
    table = attention_rows(make_trace([make_layer()], 9), make_sequence(10, prompt_end=9))
    assert table.num_rows == 0
    assert table.schema.equals(schema.ATTENTION_RESULTS.schema)
    assert recommend(table.to_pandas(), seed=0)["kept_frac"] == []


def test_uniform_attention_needs_all_but_what_may_be_lost() -> None:
    trace = make_trace([make_layer(scale=0.0)], 200)
    frame = measured(trace, make_sequence(201, prompt_end=199), row_quantile=1.0)
    # The only later row sees 200 keys alike and may lose 10 of them.
    assert (frame["oracle_frac_95"] == np.float32(189 / 199)).all()
    assert (frame["needed_frac_95"] == frame["oracle_frac_95"]).all()
    assert (frame["row_variance"] == 0).all()


def test_where_all_attention_is_on_one_key_the_protected_ones_are_what_is_left() -> None:
    trace = make_trace([make_layer()], 120)
    arrays = trace.arrays[0]
    arrays["query"][...], arrays["key"][...] = 1.0, 0.0
    arrays["key"][:, 0] = 1000.0
    frame = measured(trace, make_sequence(120, prompt_end=100))
    assert (frame["oracle_frac_99"] == np.float32(1 / 100)).all()
    assert (frame["needed_frac_99"] == np.float32(20 / 100)).all()
    assert (frame["first_1_mass"] == 1).all()
    np.testing.assert_allclose(frame["gini"], 1 - np.mean(1 / np.arange(101, 121)), rtol=1e-6)


def test_half_precision_is_read_as_it_was_stored() -> None:
    layer = make_layer(window=12, sinks=(0.5, 0.0, 1.0, -1.0))
    trace = make_trace([layer], 30)
    bits = {
        kind: (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for kind, data in trace.arrays[0].items()
    }
    wide = {kind: (data.astype(np.uint32) << 16).view(np.float32) for kind, data in bits.items()}
    sequence = make_sequence(31, prompt_end=15)
    half = attention_rows(replace(trace, arrays={0: bits}, dtype="bfloat16"), sequence)
    assert half.equals(attention_rows(replace(trace, arrays={0: wide}, dtype="float32"), sequence))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_recorded_models_are_measured_as_loops_measure_them(name: str, tmp_path: Path) -> None:
    trace = record(tmp_path, architectures.model(name), "qkv")
    sequence = trace.sequences.iloc[0]
    frame = measured(trace, sequence)
    point = int(sequence["prompt_end"])
    for layer in trace.spec.layers:
        slow = slow_layer(trace, layer, point, str(sequence["sequence_id"]))
        row = frame.loc[(layer.index, schema.ALL)]
        np.testing.assert_allclose(
            row["distance_mass"], slow.distance_mass(schema.ALL), rtol=1e-3, atol=1e-6
        )
        assert sum(row["distance_mass"]) + row["first_1_mass"] == pytest.approx(1, abs=1e-6)
        for column, value in slow.shapes(schema.ALL).items():
            # A key more or less at the very edge of a mass is float32's to decide.
            same(row[column], value, column, rtol=0.02 if "keys_" in column else 1e-3)
    assert (frame["needed_frac_99"] >= frame["needed_frac_90"]).all()
    assert (frame["needed_frac_95"] >= frame["oracle_frac_95"] - 1e-6).all()
    again = attention_rows(trace, sequence)
    assert again.equals(attention_rows(trace, sequence))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_without_queries_and_keys_the_recorded_statistics_give_the_shape(
    name: str, tmp_path: Path
) -> None:
    model = architectures.model(name)
    frames = []
    for capture in ("qkv", "hidden"):
        trace = record(tmp_path / capture, model, capture)
        frames.append(measured(trace, trace.sequences.iloc[0]))
    whole, poor = frames
    assert list(whole.index) == list(poor.index)
    columns = ["num_scored", "seen_keys", "entropy_nats", "entropy_frac", "entropy_variance"]
    for column in [*columns, "effective_keys"]:
        np.testing.assert_allclose(poor[column], whole[column], rtol=1e-3, atol=1e-6)
    is_sunk = name == "gpt_oss"
    assert poor["first_4_mass"].isna().all() == is_sunk
    if not is_sunk:
        np.testing.assert_allclose(poor["first_4_mass"], whole["first_4_mass"], atol=1e-5)
    assert poor[["keys_95", "gini", "distance_mass", "half_life_rows"]].isna().all().all()
    assert recommend(poor.reset_index(), seed=0)["layer"] == []


def test_a_trace_of_steps_alone_says_which_capture_is_needed(tmp_path: Path) -> None:
    trace = record(tmp_path, tiny.model(), "steps")
    with pytest.raises(TraceError, match="--capture hidden or qkv"):
        attention_rows(trace, trace.sequences.iloc[0])


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, math.nan])
def test_a_quantile_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="row quantile"):
        attention_rows(make_trace([make_layer()], 9), make_sequence(9), row_quantile=share)


def record(folder: Path, model: Any, capture: str) -> Trace:
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record

    model.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    path = folder / "p.txt"
    path.write_text("the river in the morning and on and on\n", encoding="utf-8")
    options = RecordOptions(max_new_tokens=6, capture=capture)
    record(str(folder / "model"), str(path), folder / "trace", options)
    return Trace(folder / "trace")
