"""Attention and the next token on whole sequences against loops, made-up and recorded; summaries."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import architectures, oracles_attention, tiny
from tests import oracles_attended as slow
from tests.simulate.test_attention import MadeUp, make_layer, make_sequence, make_trace, record
from tracekit import schema
from tracekit.cli.attended import attended_text, read_attended
from tracekit.cli.output import WIDTH
from tracekit.errors import InputError
from tracekit.measure import attention_shape
from tracekit.measure.stats import bootstrap_mean
from tracekit.simulate.attended import (
    DRIFT_MEASURES,
    LAGS,
    MEASURES,
    attended_tables,
    summarise_attended,
)
from tracekit.simulate.plan import make_plan
from tracekit.simulate.run import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


NAME = "one#0"


@dataclass(frozen=True)
class WithTokens(MadeUp):
    """A made-up trace that knows its tokens."""

    ids: tuple[int, ...] = ()

    def table(self, name: str, *, sequence_id: str, columns: Sequence[str]) -> pd.DataFrame:
        assert (name, sequence_id) == ("tokens", NAME)
        # Rows of a table need not be in order.
        places = list(range(len(self.ids)))[::-1]
        return pd.DataFrame({"position": places, "token_id": self.ids[::-1]})[list(columns)]


def with_tokens(trace: MadeUp, num_tokens: int, num_ids: int = 5, seed: int = 0) -> Any:
    ids = np.random.default_rng(seed).integers(num_ids, size=num_tokens).tolist()
    return WithTokens(trace.spec, trace.arrays, trace.dtype, ids=tuple(ids))


def measured(trace: Any, sequence: pd.Series[Any]) -> tuple[Any, Any]:
    tables = attended_tables(trace, sequence)
    attended, drift = tables["attended"].to_pandas(), tables["anchor_drift"].to_pandas()
    return (
        attended.set_index(["layer", "head"]),
        drift.set_index(["layer", "context_first", "context_last"]),
    )


def same(row: pd.Series[Any], expected: dict[str, float], names: Sequence[str], tol: float) -> None:
    for name in names:
        wanted = expected.get(name, math.nan)
        np.testing.assert_allclose(float(row[name]), wanted, rtol=tol, atol=tol, err_msg=name)


def check(
    trace: Any, sequence: pd.Series[Any], ids: Sequence[int], first_row: int, tol: float = 1e-6
) -> None:
    """Compare all rows of all layers of a trace with the twins'."""
    attended, drift = measured(trace, sequence)
    prompt_end = None if pd.isna(sequence["prompt_end"]) else int(sequence["prompt_end"])
    num_rows, num_drift = int(sequence["num_tokens"]) - 1, 0
    for layer in trace.spec.layers:
        blocks = trace.attention_inputs(str(sequence["sequence_id"]), layer.index)
        query, key = (blocks[kind].data.astype(np.float64) for kind in ("query", "key"))
        heads, _ = oracles_attention.attention(layer, query, key)
        each = [
            slow.over_rows({t: rows[t] for t in range(first_row, num_rows)}, ids) for rows in heads
        ]
        for head, expected in enumerate(each):
            row = attended.loc[(layer.index, head)]
            assert (row["first_row"], row["num_scored"]) == (first_row, num_rows - first_row)
            same(row, expected, MEASURES, tol)
        mean = {
            name: float(np.mean([one[name] for one in each]))
            for name in MEASURES
            if name in each[0]
        }
        same(attended.loc[(layer.index, schema.ALL)], mean, MEASURES, tol)
        sets = {
            t: slow.anchors([rows[t] for rows in heads], schema.ANCHOR_KEYS)
            for t in range(max(0, first_row - max(LAGS)), num_rows)
        }
        moves = slow.drift(sets, range(first_row, num_rows), prompt_end)
        num_drift += len(moves)
        for place, numbers in moves.items():
            same(drift.loc[(layer.index, *place)], numbers, ["num_scored", *DRIFT_MEASURES], tol)
    assert len(attended) == sum(one.num_heads + 1 for one in trace.spec.layers)
    assert len(drift) == num_drift


@settings(max_examples=40)
@given(data=st.data())
def test_every_number_is_that_of_loops_over_heads_rows_and_keys(data: st.DataObject) -> None:
    groups, group_size = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    num_rows = data.draw(st.integers(1, 80))
    layer = make_layer(
        groups=groups,
        group_size=group_size,
        scale=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        sinks=data.draw(st.none() | st.just((0.5,) * (groups * group_size))),
        window=data.draw(st.none() | st.integers(1, 40)),
    )
    # The last token may have a row of its own, which nothing follows.
    num_tokens = num_rows + data.draw(st.integers(0, 1))
    prompt_end = data.draw(st.none() | st.integers(1, num_rows))
    scored_from = data.draw(st.integers(1, num_rows)) if prompt_end is None else 1
    seed = data.draw(st.integers(0, 99))
    made = make_trace([layer], num_rows, seed)
    trace = with_tokens(made, num_tokens, data.draw(st.integers(1, 9)), seed)
    sequence = make_sequence(num_tokens, prompt_end, scored_from)
    first_row = prompt_end or scored_from - 1
    if first_row >= num_tokens - 1:
        assert [len(one) for one in measured(trace, sequence)] == [0, 0]
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_shape, "BLOCK_BYTES", data.draw(st.sampled_from([8, 4000, 1 << 20]))
        )
        check(trace, sequence, trace.ids, first_row)


def test_the_columns_of_the_schema_are_those_that_are_measured() -> None:
    names = {column.name for column in schema.ATTENDED.columns}
    assert set(MEASURES) < names
    assert set(DRIFT_MEASURES) < {column.name for column in schema.ANCHOR_DRIFT.columns}


def test_one_token_has_none_after_it_and_two_have_an_empty_context() -> None:
    layer = make_layer(groups=1, group_size=1)
    trace = with_tokens(make_trace([layer], 1), 1)
    assert [len(one) for one in measured(trace, make_sequence(1))] == [0, 0]
    attended, drift = measured(with_tokens(make_trace([layer], 2), 2), make_sequence(2))
    assert (attended["num_scored"] == 1).all()
    assert (attended["copied_frac"] == 0).all()
    assert attended[["next_mass", "rank_median", "induction_mass"]].isna().all().all()
    assert drift.empty


def test_hits_of_all_rows_never_exceed_what_could_be_copied() -> None:
    trace = with_tokens(make_trace([make_layer()], 90), 91, num_ids=30)
    attended, _ = measured(trace, make_sequence(91, 20))
    for k in (1, 8, 64):
        of_copied = attended[f"top_{k}_hit"] * attended["copied_frac"]
        np.testing.assert_allclose(attended[f"top_{k}_hit_all"], of_copied, rtol=1e-5)
        assert (attended[f"top_{k}_hit_all"] <= attended["copied_frac"]).all()


def test_a_head_that_looks_where_its_token_was_followed_foretells_a_loop() -> None:
    period, num = 5, 40
    layer = make_layer(groups=1, group_size=1)
    trace = make_trace([layer], num)
    # Keys name the token before theirs, queries their own; weights are too sharp for the rest.
    ids = tuple(t % period for t in range(num + 1))
    size = trace.arrays[0]["query"].shape[-1]
    code = np.random.default_rng(0).normal(size=(period, size))
    code *= 10 / np.linalg.norm(code, axis=1, keepdims=True)
    trace.arrays[0]["query"][0] = code[list(ids[:num])]
    trace.arrays[0]["key"][0] = code[[ids[t - 1] for t in range(num)]]
    trace = WithTokens(trace.spec, trace.arrays, ids=ids)
    attended, _ = measured(trace, make_sequence(num + 1, 2 * period))
    row = attended.loc[(0, 0)]
    for name in ("copied_frac", "next_mass", "top_1_hit_all", "induction_mass", "induction_hit"):
        assert row[name] == pytest.approx(1, abs=1e-4), name
    assert row["rank_median"] == 1


def test_anchors_that_never_move_do_not_drift_and_grow_old() -> None:
    trace = make_trace([make_layer()], 200)
    arrays = trace.arrays[0]
    arrays["query"][...], arrays["key"][...] = 1.0, 0.0
    arrays["key"][:, 1:17] = 50.0
    _, drift = measured(with_tokens(trace, 201), make_sequence(201, 100))
    assert (drift[["drift_1", "drift_16"]] == 0).all().all()
    assert (drift["prompt_frac"] == 1).all()
    assert drift.index.tolist() == [(0, 65, 128), (0, 129, 256)]
    rows = {
        place: range(max(first - 1, 100), min(last, 200))
        for place, first, last in (((0, 65, 128), 65, 128), ((0, 129, 256), 129, 256))
    }
    for place, times in rows.items():
        assert drift.loc[place, "age_tokens"] == pytest.approx(np.mean(times) - 8.5)


def test_layers_that_are_refused_or_were_not_stored_have_no_rows() -> None:
    layers = [make_layer(0), make_layer(1, refusal="its attention is another"), make_layer(2)]
    trace = make_trace(layers, 30)
    del trace.arrays[2]
    attended, drift = measured(with_tokens(trace, 31), make_sequence(31))
    assert set(attended.index.get_level_values("layer")) == {0}
    assert set(drift.index.get_level_values("layer")) == {0}


def test_half_precision_is_read_as_it_was_stored() -> None:
    trace = make_trace([make_layer(window=25, sinks=(0.5, 0.0, 1.0, -1.0))], 40)
    bits = {
        kind: (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for kind, data in trace.arrays[0].items()
    }
    wide = {kind: (data.astype(np.uint32) << 16).view(np.float32) for kind, data in bits.items()}
    half, single = (
        attended_tables(
            with_tokens(replace(trace, arrays={0: data}, dtype=dtype), 41), make_sequence(41, 15)
        )
        for data, dtype in ((bits, "bfloat16"), (wide, "float32"))
    )
    assert half == single


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3n", "gpt_oss"])
def test_recorded_models_are_measured_as_loops_measure_them(name: str, tmp_path: Path) -> None:
    trace = record(tmp_path, architectures.model(name), "qkv")
    sequence = trace.sequences.iloc[0]
    tokens = trace.table("tokens", sequence_id=str(sequence["sequence_id"]))
    # Layers that read another's keys are measured with their own queries.
    assert name != "gemma3n" or {"shared"} < {one.kind for one in trace.spec.layers}
    check(trace, sequence, tokens["token_id"].tolist(), int(sequence["prompt_end"]), 1e-3)
    again = attended_tables(trace, sequence)
    assert again == attended_tables(trace, sequence)


@pytest.mark.parametrize("capture", ["steps", "hidden"])
def test_without_queries_and_keys_one_line_says_why_there_are_no_rows(
    capture: str, tmp_path: Path
) -> None:
    trace = record(tmp_path, tiny.model(), capture)
    assert all(
        table.num_rows == 0 for table in attended_tables(trace, trace.sequences.iloc[0]).values()
    )
    if capture == "steps":
        return
    done = simulate(trace, tmp_path / "r", make_plan([], [], attention=True))
    assert not done.failed
    assert [one["why"] for one in done.skipped] == [
        "the trace has no queries and keys (--capture hidden), record it with --capture qkv"
    ]
    assert not (tmp_path / "r" / "attended.parquet").exists()
    with pytest.raises(InputError, match="--capture qkv"):
        read_attended(tmp_path / "r")


def made_rows(num_sequences: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    parts: list[list[pd.DataFrame]] = [[], []]
    for seed in range(num_sequences):
        layers = [make_layer(index) for index in range(2)]
        trace = with_tokens(make_trace(layers, 80, seed), 81, 12, seed)
        tables = attended_tables(trace, make_sequence(81, 30))
        for part, name in zip(parts, ("attended", "anchor_drift"), strict=True):
            frame = tables[name].to_pandas().astype({"sequence_id": object, "domain": object})
            part.append(frame.assign(sequence_id=f"{seed}#0", domain="ab"[seed % 2]))
    return pd.concat(parts[0]), pd.concat(parts[1])


def summary_of(attended: pd.DataFrame, drift: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(summarise_attended(attended, drift, seed=3))


def test_a_summary_is_the_mean_over_sequences_with_its_interval() -> None:
    attended, drift = made_rows(5)
    rows = summary_of(attended, drift)
    heads = rows[rows["context_last"].isna() & (rows["layer"] >= 0)]
    assert len(heads) == 2 * 5 * len(MEASURES)
    for (layer, head, measure), one in heads.groupby(["layer", "head", "measure"]):
        own = attended[(attended["layer"] == layer) & (attended["head"] == head)][measure]
        expected = bootstrap_mean(own.to_numpy(np.float64), seed=3)
        assert one[["mean", "low", "high", "n"]].to_numpy().tolist() == [
            [expected.mean, expected.low, expected.high, expected.n]
        ]
    whole = rows[rows["context_last"].isna() & (rows["layer"] == schema.ALL)]
    assert whole.groupby("domain", sort=False)["n"].max().to_dict() == {"all": 5, "a": 3, "b": 2}
    mean = attended[attended["head"] == schema.ALL]["next_mass"].astype(np.float64).mean()
    found = whole[(whole["domain"] == "all") & (whole["measure"] == "next_mass")]["mean"]
    assert found.iloc[0] == pytest.approx(mean)
    moved = rows[(rows["context_last"] == 64) & (rows["measure"] == "drift_16")]
    assert moved["layer"].tolist() == [schema.ALL, 0, 1]
    own = drift[drift["context_last"] == 64]["drift_16"].astype(np.float64)
    assert moved["mean"].iloc[0] == pytest.approx(own.mean())


def test_fewer_than_three_sequences_have_no_interval_and_none_has_no_rows() -> None:
    rows = summary_of(*made_rows(2))
    assert rows[["low", "high"]].isna().all().all()
    assert (rows["n"] <= 2).all()
    nothing = [
        one.schema.empty_table().to_pandas() for one in (schema.ATTENDED, schema.ANCHOR_DRIFT)
    ]
    assert summary_of(*nothing).empty


def test_the_best_heads_come_first_and_a_table_fits_the_terminal() -> None:
    columns = summarise_attended(*made_rows(4), seed=0)
    table = schema.ATTENDED_SUMMARY.build(len(columns["layer"]), columns)
    text = attended_text(table.to_pylist())
    assert max(map(len, text.splitlines())) <= WIDTH
    lines = text.split("heads whose most attended token")[1].split("layers, mean")[0].splitlines()
    firsts = [float(line.split()[2]) for line in lines if line[:6].strip().isdigit()]
    assert len(firsts) == 8
    assert firsts == sorted(firsts, reverse=True)
    for word in ("level local", "what could be copied by domain", "anchors by tokens seen"):
        assert word in text


def test_a_simulation_writes_the_same_bytes_again_and_shows_what_attention_foretells(
    trace_folder: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        assert not simulate(trace_folder, folder, make_plan([], [], attention=True)).failed
    for table in (schema.ATTENDED, schema.ANCHOR_DRIFT, schema.ATTENDED_SUMMARY):
        one, other = (folder / f"{table.name}.parquet" for folder in folders)
        assert one.read_bytes() == other.read_bytes(), table.name
        assert pq.read_schema(one).equals(table.schema)
    data, text = read_attended(folders[0])
    json.dumps(data)
    assert "heads whose most attended token" in text
    assert {row["measure"] for row in data["attended"]} == {*MEASURES, *DRIFT_MEASURES}
