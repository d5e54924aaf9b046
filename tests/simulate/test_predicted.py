"""Level predicted, from recorded probes of a tiny model to rows of results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tracekit import schema
from tracekit.errors import TraceError, UsageError
from tracekit.kv.parse import parse
from tracekit.record.options import RecordOptions
from tracekit.record.probe_options import ProbeOptions
from tracekit.record.recorder import record
from tracekit.simulate import stacks as stacks_module
from tracekit.simulate.columns import LOCAL
from tracekit.simulate.kv import Recorded, replay_sequence, replays
from tracekit.simulate.predicted import Prediction, predict_sequence
from tracekit.simulate.stacks import Stacks
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from tracekit.kv.policy import Policy

FAMILIES = [
    [parse("knorm:kept=0.3"), parse("knorm:kept=0.6")],
    [parse("h2o:kept=0.4,every=4")],
    [parse("full")],
    [parse("tova:kept=0.4")],
    [parse("influence:kept=0.4")],
]
ASKED = "asked#0"


def recorded_with(folder: Path, model_folder: Path, prompt_file: Path, **options: Any) -> Trace:
    probes = ProbeOptions(number=3, dtype="float32", **options)
    settings = RecordOptions(max_new_tokens=24, capture="influence", probes=probes)
    record(str(model_folder), str(prompt_file), folder, settings)
    return Trace(folder)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, prompt_file: Path) -> Trace:
    return recorded_with(tmp_path_factory.mktemp("probed") / "t", model_folder, prompt_file)


def row_of(trace: Trace, sequence_id: str = ASKED) -> pd.Series[Any]:
    rows = trace.sequences
    return rows[rows["sequence_id"] == sequence_id].iloc[0]


def predicted(
    trace: Trace, families: Sequence[Sequence[Policy]] = FAMILIES, **more: Any
) -> Prediction:
    return predict_sequence(trace, row_of(trace), families, seed=3, bytes_per_number=2, **more)


def slow_kl(trace: Trace, policy: Policy, block: int) -> tuple[float, float, dict[Any, float]]:
    """Return KL, its standard error, and contributions by (layer, head), by loops."""
    recorded = Recorded.of(trace, row_of(trace))
    stacks = Stacks(trace, ASKED, 2, probes=True)
    effects: dict[tuple[int, int], np.ndarray] = {}
    for layers, _, result in replays(stacks, [[policy]], recorded.spans, 3):
        for at, layer in enumerate(layers):
            for head in range(layer.num_kv_heads):
                effects[layer.index, head] = result.measures.influence_NLGPR[0, at, head]
    num_probes, num_rows = next(iter(effects.values())).shape
    kls, parts = [], dict.fromkeys(effects, 0.0)
    for p in range(num_probes):
        kl = 0.0
        for start in range(0, num_rows, block):
            own = {
                place: float(one[p, start : start + block].sum()) for place, one in effects.items()
            }
            total = sum(own.values())
            kl += total**2 / (2 * num_rows)
            for place, one in own.items():
                parts[place] += one * total / (2 * num_rows) / num_probes
        kls.append(kl)
    return float(np.mean(kls)), float(np.std(kls, ddof=1)) / math.sqrt(num_probes), parts


@pytest.mark.parametrize("block", [1, 5, 16])
def test_rows_equal_plain_loops_over_probes_blocks_layers_and_heads(
    trace: Trace, block: int
) -> None:
    found = predicted(trace, block=block)
    assert not found.refused
    assert found.note == ""
    for family in FAMILIES:
        for policy in family:
            kl, spread, parts = slow_kl(trace, policy, block)
            rows = found.tables[policy.text].to_pandas()
            rows = rows[rows["steps"] == schema.ANY].set_index(["layer", "kv_head"])
            told = rows["kl_predicted_nats"].astype(float)
            whole = (schema.ALL, schema.ALL)
            assert told[whole] == pytest.approx(kl, rel=1e-5, abs=1e-12)
            assert rows["kl_predicted_se_nats"][whole] == pytest.approx(spread, rel=1e-5, abs=1e-12)
            assert rows["kl_predicted_se_nats"].notna().sum() == 1
            for place, part in parts.items():
                assert told[place] == pytest.approx(part, rel=1e-4, abs=1e-9)
            of_layers = told[[one for one in told.index if one[1] == schema.ALL and one != whole]]
            assert of_layers.sum() == pytest.approx(kl, rel=1e-4, abs=1e-12)


def test_the_accounting_is_that_of_level_local_and_its_measures_are_null(trace: Trace) -> None:
    told = predicted(trace).tables
    cells = replay_sequence(trace, row_of(trace), FAMILIES, seed=3, bytes_per_number=2)
    local = {text: one["kv"] for text, one in cells.items()}
    assert told.keys() == local.keys()
    for text, table in told.items():
        assert table.schema.equals(schema.KV_RESULTS.schema)
        assert set(table["level"].to_pylist()) == {"predicted"}
        for name in LOCAL:
            assert table[name].null_count == len(table)
        foretold = ("kl_predicted_nats", "kl_predicted_se_nats")
        for name in foretold:
            assert local[text][name].null_count == len(table)
        for name in set(table.column_names) - {*LOCAL, *foretold, "level"}:
            assert table[name].equals(local[text][name]), name


def test_buckets_of_steps_have_no_prediction_of_their_own(trace: Trace) -> None:
    for table in predicted(trace).tables.values():
        rows = table.to_pandas()
        assert set(rows["steps"]) > {schema.ANY}
        assert rows.loc[rows["steps"] != schema.ANY, "kl_predicted_nats"].isna().all()
        assert rows.loc[rows["steps"] == schema.ANY, "kl_predicted_nats"].notna().all()


def test_a_full_cache_is_foretold_to_lose_nothing(trace: Trace) -> None:
    rows = predicted(trace).tables[parse("full").text].to_pandas()
    assert rows["kl_predicted_nats"].max() < 1e-12


def test_stacks_of_any_size_foretell_the_same(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = predicted(trace).tables
    monkeypatch.setattr(stacks_module, "STACK_BYTES", 1)
    for text, table in predicted(trace).tables.items():
        np.testing.assert_allclose(
            table["kl_predicted_nats"].to_numpy(),
            whole[text]["kl_predicted_nats"].to_numpy(),
            rtol=1e-4,
            atol=1e-9,
        )


def test_a_policy_that_evicts_before_the_probes_is_refused_by_name_and_the_others_go_on(
    trace: Trace,
) -> None:
    early, prompt = parse("knorm:kept=0.5,at=7"), parse("h2o:kept=0.5,evict-prompt=9")
    found = predicted(trace, [[early], [prompt], *FAMILIES])
    assert set(found.tables) == {one.text for family in FAMILIES for one in family}
    first = int(row_of(trace)["probed_from"])
    assert f"begin at row {first} and it evicts at 7" in found.refused[early.text]
    assert "--probe-from 7" in found.refused[early.text]
    assert "--level propagated" in found.refused[prompt.text]


def test_a_policy_without_an_eviction_point_there_is_left_out(trace: Trace) -> None:
    found = predict_sequence(
        trace,
        row_of(trace, "plain#0"),
        [[parse("snapkv:kept=0.5,at=context,window=4")], [parse("knorm:kept=0.5")]],
        seed=3,
        bytes_per_number=2,
    )
    assert [text.split(":")[0] for text in found.tables] == ["knorm"]
    assert not found.refused


def test_layers_without_probes_are_named_and_add_nothing(
    tmp_path: Path, trace: Trace, model_folder: Path, prompt_file: Path
) -> None:
    some = recorded_with(tmp_path / "t", model_folder, prompt_file, layers=(1, 3))
    found = predicted(some, FAMILIES[:1])
    assert found.note.startswith("2 of 4 layers have no probes")
    rows = found.tables[FAMILIES[0][0].text].to_pandas()
    rows = rows[rows["steps"] == schema.ANY].set_index(["layer", "kv_head"])["kl_predicted_nats"]
    assert rows.drop(index=[1, 3, schema.ALL], level=0).isna().all()
    of_layers = rows[[(1, schema.ALL), (3, schema.ALL)]]
    assert of_layers.sum() == pytest.approx(rows[schema.ALL, schema.ALL], rel=1e-4)
    with pytest.raises(UsageError, match="influence probes"):
        replay_sequence(some, row_of(some), FAMILIES[-1:], seed=3, bytes_per_number=2)


def test_a_trace_without_probes_says_how_to_record_them(trace_folder: Path) -> None:
    bare = Trace(trace_folder)
    with pytest.raises(TraceError, match=r"has no influence probes: .*--capture influence"):
        predicted(bare)
    with pytest.raises(UsageError, match="--capture influence"):
        replay_sequence(bare, row_of(bare), FAMILIES[-1:], seed=3, bytes_per_number=2)
