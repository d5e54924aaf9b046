from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tracekit import schema
from tracekit.kv.engine import NEVER
from tracekit.record.options import RecordOptions
from tracekit.record.prompts import read_prompts
from tracekit.record.recorder import record
from tracekit.record.sources.prompts import PromptSource
from tracekit.simulate.explain import explain
from tracekit.simulate.held import HeldEntries
from tracekit.simulate.kv import replay_sequence
from tracekit.simulate.plan import make_plan
from tracekit.simulate.run import simulate
from tracekit.simulate.shown import SHOWN_SEQUENCES, choose_sequences
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

POLICIES = ("knorm:kept=0.3", "streaming:kept=0.5,sinks=2", "quest:read=0.5,page=4", "full")


@st.composite
def stacks(draw: st.DrawFn) -> list[Any]:
    """Return stand-ins for stacks of layers, each with its window and what was evicted when."""
    num_rows, num_heads = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    times = st.integers(1, num_rows + 1) | st.just(NEVER)
    made = []
    for _ in range(draw(st.integers(1, 3))):
        shape = (1, draw(st.integers(1, 2)), num_heads, num_rows)
        size = int(np.prod(shape))
        evicted_at = draw(st.lists(times, min_size=size, max_size=size))
        held = SimpleNamespace(evicted_at_NLGT=np.array(evicted_at, dtype=np.int32).reshape(shape))
        window = draw(st.none() | st.integers(1, 15))
        made.append(SimpleNamespace(held=held, layer=SimpleNamespace(window=window), point=1))
    return made


def slow(some: list[Any]) -> list[float | None]:
    """Ask of each position, head by head, whether the last row can read its entry."""
    num_rows = some[0].held.evicted_at_NLGT.shape[-1]
    parts: list[float | None] = []
    for position in range(num_rows):
        held = full = 0
        for stack in some:
            for layer in stack.held.evicted_at_NLGT[0]:
                for head in layer:
                    window = stack.layer.window
                    if window is not None and num_rows - 1 - position >= window:
                        continue
                    full += 1
                    held += not head[position] < num_rows
        parts.append(held / full if full else None)
    return parts


@given(stacks())
def test_the_part_of_the_heads_equals_counting_them_one_by_one(some: list[Any]) -> None:
    held = HeldEntries()
    for stack in some:
        held.add(stack, 0)
    policy: Any = SimpleNamespace(text="p:kept=0.5", family="p")
    table = held.row(policy, "a#0")
    assert table.schema.equals(schema.HELD.schema)
    (found,) = table["held_frac"].to_pylist()
    assert found == [one if one is None else pytest.approx(one, rel=1e-6) for one in slow(some)]


@pytest.fixture(scope="module")
def sliding_folder(tmp_path_factory: pytest.TempPathFactory, prompt_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("sliding")
    tiny.model("mistral", sliding_window=12).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    source = PromptSource(read_prompts(str(prompt_file)), limit=1)
    options = RecordOptions(max_new_tokens=9)
    assert not record(str(folder / "model"), source, folder / "trace", options).skipped
    return folder / "trace"


@pytest.fixture(params=["trace_folder", "sliding_folder"])
def trace(request: pytest.FixtureRequest) -> Trace:
    return Trace(request.getfixturevalue(request.param))


def made(trace: Trace) -> dict[str, Any]:
    row = next(row for _, row in trace.sequences.iterrows())
    return replay_sequence(
        trace, row, make_plan(list(POLICIES)).families, seed=3, bytes_per_number=2
    )


def test_what_is_held_at_the_end_is_the_kept_fraction_at_the_end(trace: Trace) -> None:
    tables = made(trace)
    assert len(tables) > len(POLICIES) - 1
    for text, one in tables.items():
        kv = one["kv"].to_pandas()
        whole = kv[(kv["layer"] == schema.ALL) & (kv["steps"] == schema.ANY)]
        (held,) = one["held"]["held_frac"].to_pylist()
        there = [part for part in held if part is not None]
        # All layers of these models have one window: a position counts for all heads or none.
        assert np.mean(there) == pytest.approx(whole["kept_end_frac"].iloc[0], rel=1e-5), text
        window = trace.spec.layers[0].window
        assert len(there) == min(window or len(held), len(held))


def test_recall_and_the_full_cache_hold_all(trace_folder: Path) -> None:
    for text, one in made(Trace(trace_folder)).items():
        (held,) = one["held"]["held_frac"].to_pylist()
        assert (min(held) < 1) == (not text.startswith(("quest", "full"))), text


def test_the_part_is_what_the_heads_tell_one_by_one(trace_folder: Path) -> None:
    trace, plan = Trace(trace_folder), make_plan(["knorm:kept=0.3"])
    layers, heads = range(4), range(2)
    strips = [explain(trace, "plain#0", layer, head, plan) for layer in layers for head in heads]
    tokens = len(strips[0][0])
    kept = [strip.kept_T(tokens - 1) for _, (strip,) in strips]
    row = next(row for _, row in trace.sequences.iterrows() if row["sequence_id"] == "plain#0")
    (one,) = replay_sequence(trace, row, plan.families, seed=0, bytes_per_number=2).values()
    (found,) = one["held"]["held_frac"].to_pylist()
    np.testing.assert_allclose(found[:-1], np.mean(kept, axis=0), rtol=1e-6)
    assert found[-1] == 1
    assert one["held"]["point"].to_pylist() == [strips[0][1][0].point]


def test_what_is_left_of_the_shown_sequences_is_collected(
    trace_folder: Path, results_folder: Path
) -> None:
    held = pq.read_table(results_folder / "held.parquet")
    assert held.schema.equals(schema.HELD.schema)
    rows = held.to_pandas()
    names = choose_sequences(Trace(trace_folder))
    assert len(names) <= SHOWN_SEQUENCES
    assert set(rows["sequence_id"]) == set(names)
    kv = pq.read_table(results_folder / "kv.parquet").to_pandas()
    assert set(rows["policy"]) == set(kv["policy"])
    shown = pq.read_table(results_folder / "shown.parquet").to_pandas()
    num_tokens = shown.groupby("sequence_id", observed=True).size()
    # The last token never enters the cache.
    lengths = rows["held_frac"].map(len).to_numpy()
    assert (lengths == num_tokens[rows["sequence_id"]].to_numpy() - 1).all()


def test_a_cell_without_what_is_left_is_computed_again(tmp_path: Path, trace_folder: Path) -> None:
    plan = make_plan(["knorm:kept=0.3"], [], attention=False)
    first = simulate(trace_folder, tmp_path, plan)
    assert first.num_computed > 1
    before = (tmp_path / "held.parquet").read_bytes()
    next((tmp_path / "cells").glob("*-1.parquet")).unlink()
    again = simulate(trace_folder, tmp_path, plan)
    assert (again.num_computed, again.num_found) == (1, first.num_computed - 1)
    assert (tmp_path / "held.parquet").read_bytes() == before
