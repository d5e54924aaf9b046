"""Candidate sets on a recorded trace: what is written, what is skipped, what is refused."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests import oracles_vocab as slow
from tests import tiny
from tracekit import schema
from tracekit.errors import ModelError, TraceError, UsageError
from tracekit.measure.head import Head
from tracekit.record.options import RecordOptions
from tracekit.record.prompts import read_prompts
from tracekit.record.recorder import record
from tracekit.record.sources.prompts import PromptSource
from tracekit.simulate.plan import Inside, make_plan
from tracekit.simulate.questions import Vocabulary
from tracekit.simulate.run import simulate
from tracekit.trace.reader import Trace
from tracekit.vocab.estimators.lowrank import LowRank

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from tracekit.vocab.view import View

VOCAB = [
    "oracle",
    "frequency",
    "lowrank:rank=4+previous:top=8",
    "previous:top=8@rate",
    "lowrank:rank=4@fallback:confidence=0.2",
    "frequency@rate@fallback",
]
SIZES = (4, 16, 64, 4096)
TABLES = ("vocab", "candidates", "scored_steps", "summary")


def read(folder: Path, name: str) -> pd.DataFrame:
    return pq.read_table(folder / f"{name}.parquet").to_pandas()


@pytest.fixture(scope="module")
def vocab_folder(tmp_path_factory: pytest.TempPathFactory, trace_folder: Path) -> Path:
    out = tmp_path_factory.mktemp("vocab") / "results"
    done = simulate(trace_folder, out, make_plan(vocab=VOCAB, sizes=SIZES))
    assert not done.failed
    assert not done.skipped
    return out


@pytest.fixture(scope="module")
def single_folder(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, prompt_file: Path
) -> Path:
    """Return a trace of one prompt, with final hidden states alone."""
    out = tmp_path_factory.mktemp("single") / "trace"
    options = RecordOptions(max_new_tokens=4, capture="hidden")
    record(str(model_folder), PromptSource(read_prompts(str(prompt_file)), limit=1), out, options)
    return out


def test_tables_have_the_documented_schema(vocab_folder: Path) -> None:
    for table in (schema.VOCAB_RESULTS, schema.CANDIDATES, schema.SCORED):
        assert pq.read_schema(vocab_folder / f"{table.name}.parquet").equals(table.schema)


def test_means_are_those_of_the_steps(vocab_folder: Path) -> None:
    by = ["sequence_id", "estimator", "controller", "fit", "size"]
    steps = read(vocab_folder, "candidates").groupby(by, observed=True)
    vocab = read(vocab_folder, "vocab").set_index(by)
    assert len(steps) == len(vocab)
    for name, mean in (
        ("hit_chosen", "hit_chosen"),
        ("hit_argmax", "hit_argmax"),
        ("hit_top_p", "hit_top_p"),
        ("neg_log_mass_nats", "neg_log_mass_nats"),
        ("jsd_nats", "jsd_nats"),
        ("backoff_kl_nats", "backoff_kl_nats"),
        ("backoff_kl_causal_nats", "backoff_kl_causal_nats"),
        ("set_size", "set_size_mean"),
        ("is_fallback", "fallback_frac"),
        ("nll_backoff", "nll_backoff"),
    ):
        wanted = steps[name].mean()
        np.testing.assert_allclose(vocab.loc[wanted.index, mean], wanted, rtol=1e-5, atol=1e-6)
    counts = steps.size()
    assert (vocab.loc[counts.index, "num_scored"] == counts).all()
    loss = np.exp(-read(vocab_folder, "candidates")["neg_log_mass_nats"])
    mass = (
        read(vocab_folder, "candidates").assign(mass=loss).groupby(by, observed=True)["mass"].mean()
    )
    np.testing.assert_allclose(vocab.loc[mass.index, "mass"], mass, rtol=1e-5)


def test_steps_are_those_of_explicit_sets_and_distributions(
    vocab_folder: Path, trace_folder: Path
) -> None:
    trace = Trace(trace_folder)
    head = Head.load(trace.weights_path, trace.spec.head)
    classes = trace.vocabulary().set_index("token_id")["class"].astype(str)
    pinned = [int(i) for i in classes.index[classes.isin(["special", "byte"])]]
    frame, scored = read(vocab_folder, "candidates"), read(vocab_folder, "scored_steps")
    oracle = frame[(frame["estimator"] == "oracle") & (frame["controller"] == "fixed")]
    name = str(trace.sequences["sequence_id"].iloc[0])
    hidden_TE = torch.from_numpy(np.array(trace.hidden(name).data)).float()
    tokens = trace.table("tokens", columns=["sequence_id", "token_id"])
    ids = tokens.loc[tokens["sequence_id"] == name, "token_id"].tolist()
    distributions: dict[int, list[list[float]]] = {}
    sets: dict[int, list[set[int]]] = {}
    for _, row in oracle[oracle["sequence_id"] == name].iterrows():
        place, size = int(row["position"]), int(row["size"])
        logits = head.logits(hidden_TE[place - 1 : place])[0].tolist()
        wanted = slow.covered(logits, slow.order(logits), pinned, size, int(ids[place]))
        for column in ("set_size", "hit_chosen", "hit_top_k", "neg_log_mass_nats", "jsd_nats"):
            assert row[column] == pytest.approx(wanted[column], rel=1e-4, abs=1e-6), column
        inside = slow.candidate_set(slow.order(logits), pinned, size, len(logits))
        distributions.setdefault(size, []).append(slow.softmax(logits))
        sets.setdefault(size, []).append(inside)
        fact = scored[(scored["sequence_id"] == name) & (scored["position"] == place)].iloc[0]
        assert fact["token_id"] == ids[place]
        assert fact["best_id"] == slow.order(logits)[0]
        assert fact["class"] == classes[ids[place]]
        assert fact["nll_full"] == pytest.approx(wanted["nll_full"], rel=1e-5)
    for size, some in distributions.items():
        rows = oracle[(oracle["sequence_id"] == name) & (oracle["size"] == size)]
        assert list(rows["position"]) == sorted(rows["position"])
        causal = slow.causal_backoffs(some, sets[size])
        found = rows["backoff_kl_causal_nats"].to_numpy(np.float64)
        np.testing.assert_allclose(found, causal, rtol=1e-3, atol=1e-6)


def test_costs_are_over_those_of_the_full_head(vocab_folder: Path, trace_folder: Path) -> None:
    spec, vocab = Trace(trace_folder).spec.head, read(vocab_folder, "vocab")
    rows = vocab["set_size_mean"] / spec.num_rows
    naming = {"oracle": (1.0, 1.0), "frequency:source=all": (0.0, 0.0)}
    for estimator, (macs, num_bytes) in naming.items():
        mine = vocab["estimator"] == estimator
        np.testing.assert_allclose(vocab.loc[mine, "macs_frac"], rows[mine] + macs, rtol=1e-5)
        np.testing.assert_allclose(vocab.loc[mine, "cost_frac"], rows[mine] + num_bytes, rtol=1e-5)
    lowrank = vocab[vocab["estimator"] == "lowrank:rank=4"]
    macs = 4 * (spec.hidden_size + spec.num_rows) / (spec.hidden_size * spec.num_rows)
    frac = lowrank["set_size_mean"] / spec.num_rows + macs
    np.testing.assert_allclose(lowrank["macs_frac"], frac, rtol=1e-5)


def test_sizes_above_the_vocabulary_are_the_full_head(vocab_folder: Path) -> None:
    vocab = read(vocab_folder, "vocab")
    whole = vocab[vocab["size"] == 4096]
    fixed = whole[whole["fit"] == "asked"]
    assert (fixed["mass"] == 1).all()
    assert (fixed["neg_log_mass_nats"] == 0).all()
    assert (fixed["hit_top_k"] == 1).all()
    assert (fixed["fallback_frac"] == 0).all()
    np.testing.assert_allclose(fixed["nll_backoff"], fixed["nll_full"], rtol=1e-6)


def test_rows_of_a_controller_come_once_a_fit(vocab_folder: Path) -> None:
    vocab = read(vocab_folder, "vocab").astype({"controller": str, "fit": str})
    adapts = vocab["controller"].str.startswith("rate")
    assert set(vocab.loc[adapts, "fit"]) == {"others", "own", "shuffled"}
    assert set(vocab.loc[~adapts, "fit"]) == {"asked"}
    names = set(read(vocab_folder, "summary")["name"].astype(str))
    assert {"oracle", "frequency:source=all"} <= names
    assert any("@rate:" in name for name in names)
    # Sizes that no decoder has are compared by sequence, not summarised.
    assert not any(" fit=" in name for name in names)
    keys = ["sequence_id", "position", "estimator", "controller", "fit", "size"]
    assert not read(vocab_folder, "candidates").duplicated(keys).any()


def test_falling_back_is_the_full_head(vocab_folder: Path, trace_folder: Path) -> None:
    frame = read(vocab_folder, "candidates")
    fallen = frame[frame["is_fallback"]]
    assert len(fallen)
    assert fallen["controller"].astype(str).str.contains("fallback").all()
    assert (fallen["set_size"] == Trace(trace_folder).spec.head.num_rows).all()
    assert (fallen["neg_log_mass_nats"] == 0).all()
    assert (fallen["backoff_kl_causal_nats"] == 0).all()
    assert fallen["hit_chosen"].all()


def test_the_same_simulation_writes_the_same_bytes(
    vocab_folder: Path, trace_folder: Path, tmp_path: Path
) -> None:
    simulate(trace_folder, tmp_path / "r", make_plan(vocab=VOCAB, sizes=SIZES))
    for name in TABLES:
        one, other = (folder / f"{name}.parquet" for folder in (vocab_folder, tmp_path / "r"))
        assert one.read_bytes() == other.read_bytes(), name


def test_finished_cells_are_found_and_missing_ones_made_again(
    vocab_folder: Path, trace_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(vocab_folder, tmp_path / "copy")
    plan = make_plan(vocab=VOCAB, sizes=SIZES)
    assert simulate(trace_folder, folder, plan).num_computed == 0
    for path in sorted((folder / "cells").iterdir())[::3]:
        path.unlink()
    again = simulate(trace_folder, folder, plan)
    assert again.num_computed > 0 < again.num_found
    for name in TABLES:
        one, other = (path / f"{name}.parquet" for path in (vocab_folder, folder))
        assert one.read_bytes() == other.read_bytes(), name
    more = simulate(trace_folder, folder, make_plan(vocab=[*VOCAB, "random"], sizes=SIZES))
    # One cell a sequence of which steps were decoded.
    assert more.num_computed == read(folder, "scored_steps")["sequence_id"].nunique()


def test_what_is_fitted_on_other_prompts_is_skipped_where_there_are_none(
    single_folder: Path, tmp_path: Path
) -> None:
    plan = make_plan(
        vocab=["frequency", "oracle", "previous+frequency", "oracle@rate"], sizes=(16,)
    )
    done = simulate(single_folder, tmp_path / "r", plan)
    assert not done.failed
    reason = "it is fitted on other prompts, and the trace has none"
    assert {(one["what"], one["why"]) for one in done.skipped} == {
        ("frequency:source=all", reason),
        ("previous:top=256+frequency:source=all", reason),
    }
    vocab = read(tmp_path / "r", "vocab")
    assert set(vocab["estimator"]) == {"oracle"}
    # Without other prompts a controller has no fit on them.
    assert set(vocab["fit"]) == {"asked", "own", "shuffled"}


def test_attention_and_layer_states_that_were_not_recorded_are_named(
    single_folder: Path, tmp_path: Path
) -> None:
    from tracekit.vocab.estimator import ESTIMATORS

    needs = {name: ESTIMATORS.get(name)().needs for name in ESTIMATORS.names()}
    attending = [
        name for name, one in needs.items() if one.attention is not None and not one.others
    ]
    layered = [name for name, one in needs.items() if one.residual is not None and not one.others]
    plan = make_plan(vocab=["oracle", *attending, *layered], sizes=(16,))
    done = simulate(single_folder, tmp_path / "r", plan)
    assert not done.failed
    why = {one["what"].split(":")[0]: one["why"] for one in done.skipped}
    assert set(why) == {*attending, *layered}
    assert all("whose queries and keys the trace does not hold" in why[name] for name in attending)
    assert all("record with --hidden-layers" in why[name] for name in layered)


def test_a_trace_without_hidden_states_is_refused_in_one_sentence(
    model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    options = RecordOptions(max_new_tokens=3, capture="steps")
    source = PromptSource(read_prompts(str(prompt_file)), limit=1)
    record(str(model_folder), source, tmp_path / "t", options)
    with pytest.raises(TraceError, match="recorded with --capture steps, record it with") as raised:
        simulate(tmp_path / "t", tmp_path / "r", make_plan(vocab=["oracle"]))
    assert raised.value.exit_code == 3
    assert str(raised.value).count(". ") == 0
    assert not (tmp_path / "r").exists()


def test_an_estimator_that_raises_fails_alone(
    trace_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LowRank, view: View, limit: int) -> None:
        raise ArithmeticError("of no use")

    monkeypatch.setattr(LowRank, "ranking", fail)
    plan = make_plan(vocab=["oracle", "lowrank", "frequency", "previous+lowrank"], sizes=(16,))
    done = simulate(trace_folder, tmp_path / "r", plan)
    names = {one["cell"].split(" on ")[0].split(":")[0] for one in done.failed}
    assert names == {"lowrank", "previous"}
    assert {one["why"] for one in done.failed} == {"ArithmeticError: of no use"}
    vocab = read(tmp_path / "r", "vocab")
    assert set(vocab["estimator"]) == {"oracle", "frequency:source=all"}
    assert len(read(tmp_path / "r", "scored_steps"))
    monkeypatch.undo()
    again = simulate(trace_folder, tmp_path / "r", plan)
    assert not again.failed
    assert again.num_computed == len(done.failed)


@pytest.fixture(scope="module")
def headless_folder(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, prompt_file: Path
) -> Path:
    """Return a trace that does not hold the head."""
    from tests.conftest import NEW_TOKENS

    out = tmp_path_factory.mktemp("headless") / "trace"
    options = RecordOptions(max_new_tokens=NEW_TOKENS, head="omit")
    record(str(model_folder), str(prompt_file), out, options)
    assert not (out / "weights.safetensors").exists()
    return out


def test_a_head_that_was_not_stored_is_read_from_the_model(
    headless_folder: Path, vocab_folder: Path, tmp_path: Path
) -> None:
    simulate(headless_folder, tmp_path / "r", make_plan(vocab=VOCAB, sizes=SIZES))
    for name in ("vocab", "candidates", "scored_steps"):
        mine, theirs = (read(folder, name) for folder in (tmp_path / "r", vocab_folder))
        assert len(mine) == len(theirs)
        for column in mine.select_dtypes("number").columns:
            np.testing.assert_allclose(mine[column], theirs[column], rtol=1e-5, err_msg=column)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"hidden_size": 16}])
def test_a_head_of_another_model_is_refused(
    headless_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    tiny.model(**changes).save_pretrained(tmp_path / "other")
    tiny.tokenizer().save_pretrained(tmp_path / "other")
    plan = make_plan(vocab=["oracle"], sizes=(16,), inside=Inside(model=str(tmp_path / "other")))
    with pytest.raises(ModelError) as raised:
        simulate(headless_folder, tmp_path / "r", plan)
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("sizes", [(0,), (16, -4), (2**31,)])
def test_sizes_that_are_none_are_refused_before_anything_is_computed(
    sizes: tuple[int, ...],
) -> None:
    with pytest.raises(UsageError, match="candidate-set sizes are 1 to"):
        make_plan(vocab=["oracle"], sizes=sizes)


def test_what_hangs_on_other_prompts_is_computed_again_when_the_trace_has_grown() -> None:
    plan = make_plan(vocab=["oracle", "frequency", "oracle@rate"], sizes=(8,))
    few, many = (
        Vocabulary(cast("Any", SimpleNamespace(sequence_ids=names)), cast("Any", None), plan)
        for names in (["a#0", "b#0"], ["a#0", "b#0", "c#0"])
    )
    changed = [few.content(cell) != many.content(cell) for cell in few.cells]
    assert changed == [False, True, True]
