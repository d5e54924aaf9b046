from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tracekit import schema
from tracekit.errors import InputError, TraceError, UsageError
from tracekit.kv.scorers.key_norm import KeyNorm
from tracekit.progress import Silent
from tracekit.record.prompts import read_prompts
from tracekit.record.sources.prompts import PromptSource
from tracekit.report.render import write_report
from tracekit.simulate.plan import make_plan
from tracekit.simulate.run import simulate
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from tracekit.kv.view import View


def read(folder: Path, name: str) -> pd.DataFrame:
    return pq.read_table(folder / f"{name}.parquet").to_pandas()


def read_kv(folder: Path) -> pd.DataFrame:
    """Return the rows over all steps."""
    kv = read(folder, "kv")
    return kv[kv["steps"] == schema.ANY]


def first_of(prompt_file: Path) -> PromptSource:
    return PromptSource(read_prompts(str(prompt_file)), limit=1)


def test_every_table_has_the_documented_schema(results_folder: Path) -> None:
    for table in schema.RESULT_TABLES:
        assert pq.read_schema(results_folder / f"{table.name}.parquet").equals(table.schema)


def test_the_full_cache_loses_nothing(results_folder: Path) -> None:
    kv = read_kv(results_folder)
    full = kv[kv["family"] == "full"]
    assert len(full)
    assert (full["output_error"] == 0).all()
    assert (full["kept_frac"] == 1).all()
    assert (full["num_evicted"] == 0).all()
    np.testing.assert_allclose(full["mass_kept"], 1, atol=1e-6)


def test_rows_of_heads_layers_and_all_together_agree(results_folder: Path) -> None:
    kv = read_kv(results_folder)
    by = ["sequence_id", "policy"]
    heads = kv[(kv["kv_head"] >= 0)]
    layers = kv[(kv["layer"] >= 0) & (kv["kv_head"] == schema.ALL)].sort_values([*by, "layer"])
    summed = heads.groupby([*by, "layer"], observed=True)["kv_bytes"].sum()
    np.testing.assert_allclose(
        layers.set_index([*by, "layer"])["kv_bytes"].sort_index(), summed.sort_index()
    )
    whole = kv[kv["layer"] == schema.ALL].set_index(by).sort_index()
    mean = layers.groupby(by, observed=True)["output_error"].mean().sort_index()
    np.testing.assert_allclose(whole["output_error"], mean, rtol=1e-5)
    assert (whole["num_evicted"] == heads.groupby(by, observed=True)["num_evicted"].sum()).all()


def test_what_is_kept_is_what_was_asked_for(results_folder: Path) -> None:
    kv = read_kv(results_folder)
    once = kv[(kv["layer"] == schema.ALL) & (kv["family"] == "knorm")]
    # Tokens after the only eviction are kept, so more is held than was asked for.
    assert (once["kept_frac"] >= once["target_frac"] - 0.05).all()
    steps = kv[(kv["layer"] == schema.ALL) & (kv["family"] == "streaming")]
    assert (np.abs(steps["kept_frac"] - steps["target_frac"]) < 0.06).all()
    assert (kv["read_frac"] == kv["kept_frac"]).all()
    assert (kv["padded_frac"] >= kv["kept_frac"] - 1e-6).all()


def test_values_that_do_not_apply_are_null(results_folder: Path) -> None:
    kv = pq.read_table(results_folder / "kv.parquet")
    for name in ("kl_nats", "kl_predicted_nats", "nll_pruned", "same_top_frac"):
        assert kv[name].null_count == kv.num_rows


def test_summary_intervals_need_three_sequences(results_folder: Path) -> None:
    summary = read(results_folder, "summary")
    assert summary.loc[summary["n"] < 3, ["low", "high"]].isna().all().all()
    enough = summary[summary["n"] >= 3]
    assert (enough["low"] <= enough["mean"] + 1e-9).all()
    assert (enough["mean"] <= enough["high"] + 1e-9).all()


def test_more_candidates_cover_more_and_a_whole_vocabulary_covers_all(results_folder: Path) -> None:
    vocab = read(results_folder, "vocab")
    vocab = vocab[vocab["controller"] == "fixed"]
    for _, part in vocab.groupby(["sequence_id", "estimator"], observed=True):
        ordered = part.sort_values("size")
        assert ordered["mass"].is_monotonic_increasing
    whole = vocab[
        (vocab["size"] == 4096) & (vocab["estimator"].astype(str).str.startswith("lowrank"))
    ]
    np.testing.assert_allclose(whole["mass"], 1, atol=1e-6)
    np.testing.assert_allclose(whole["nll_backoff"], whole["nll_full"], atol=1e-5)


def test_the_same_simulation_writes_the_same_bytes(
    results_folder: Path, trace_folder: Path, tmp_path: Path
) -> None:
    simulate(trace_folder, tmp_path / "again", make_plan(sizes=(16, 64, 4096)))
    for name in ("kv", "vocab", "summary", "shown"):
        one, other = (folder / f"{name}.parquet" for folder in (results_folder, tmp_path / "again"))
        assert one.read_bytes() == other.read_bytes(), name
    pages = [
        write_report(folder, tmp_path / name / "report.html").read_bytes()
        for name, folder in (("one", results_folder), ("other", tmp_path / "again"))
    ]
    assert pages[0] == pages[1]


def test_finished_cells_are_not_computed_again_and_new_ones_are_added(
    results_folder: Path, trace_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    plan = make_plan(sizes=(16, 64, 4096))
    again = simulate(trace_folder, folder, plan)
    assert again.num_computed == 0
    for path in sorted((folder / "cells").iterdir())[::3]:
        path.unlink()
    simulate(trace_folder, folder, plan)
    for name in ("kv", "vocab", "summary"):
        assert (folder / f"{name}.parquet").read_bytes() == (
            results_folder / f"{name}.parquet"
        ).read_bytes()
    more = simulate(trace_folder, folder, make_plan(["h2o:kept=0.3"]))
    assert more.num_computed == 5


def test_a_damaged_trace_is_not_replayed(trace_folder: Path, tmp_path: Path) -> None:
    trace = shutil.copytree(trace_folder, tmp_path / "t")
    path = trace / "shards" / "00000" / "tensors.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"tensors\.parquet has another SHA-256"):
        simulate(trace, tmp_path / "r", make_plan(["h2o"]))


def test_an_empty_trace_says_how_to_go_on(trace_folder: Path, tmp_path: Path) -> None:
    trace = shutil.copytree(trace_folder, tmp_path / "t")
    shutil.rmtree(trace / "shards")
    assert Trace(trace).table("steps").empty
    with pytest.raises(TraceError, match="holds no finished sequence yet"):
        simulate(trace, tmp_path / "r", make_plan(["h2o"]))


def test_a_cell_that_cannot_be_read_is_computed_again(
    results_folder: Path, trace_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    cell = min((folder / "cells").iterdir())
    cell.write_bytes(cell.read_bytes()[:-20])
    assert simulate(trace_folder, folder, make_plan(sizes=(16, 64, 4096))).num_computed == 1


def test_a_sequence_without_the_eviction_point_is_skipped_and_counted(
    trace_folder: Path, tmp_path: Path
) -> None:
    done = simulate(
        trace_folder, tmp_path / "r", make_plan(["snapkv:kept=0.5,at=context,window=4"])
    )
    assert done.num_computed == 1
    assert {one["sequence_id"] for one in done.skipped} == {
        "plain#0",
        "emoji#0",
        "turns#0",
        "raw#0",
    }
    kv = read_kv(tmp_path / "r")
    assert not kv["query_aware"].any()
    assert not (tmp_path / "r" / "vocab.parquet").exists()


def test_a_policy_that_is_skipped_at_each_level_is_told_of_once_a_sequence(
    trace_folder: Path, tmp_path: Path
) -> None:
    class Heard(Silent):
        def __init__(self) -> None:
            self.said: list[str] = []

        def say(self, text: str) -> None:
            self.said.append(text)

    plan = make_plan(["snapkv:kept=0.5,at=context,window=4"], levels=("local", "propagated"))
    heard = Heard()
    done = simulate(trace_folder, tmp_path / "r", plan, progress=heard)
    assert len(done.skipped) == 8
    told = [one for one in heard.said if "does not apply" in one]
    assert len(told) == 1
    assert "does not apply to 4 sequences: " in told[0]


def test_a_trace_without_what_is_needed_says_which_capture_has_it(
    model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record

    options = RecordOptions(max_new_tokens=3, capture="steps")
    record(str(model_folder), first_of(prompt_file), tmp_path / "t", options)
    with pytest.raises(TraceError, match="--capture qkv"):
        simulate(tmp_path / "t", tmp_path / "r", make_plan(["h2o"]))
    with pytest.raises(TraceError, match="--capture hidden or qkv"):
        simulate(tmp_path / "t", tmp_path / "r", make_plan(vocab=["oracle"]))


def test_results_of_another_trace_are_not_mixed(
    results_folder: Path, model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record

    options = RecordOptions(max_new_tokens=3)
    record(str(model_folder), first_of(prompt_file), tmp_path / "t", options)
    with pytest.raises(InputError, match="results of another trace"):
        simulate(tmp_path / "t", results_folder)


def test_shown_tokens_stand_in_the_results(results_folder: Path, trace_folder: Path) -> None:
    shown = read(results_folder, "shown")
    trace = Trace(trace_folder)
    assert set(shown["sequence_id"]) <= set(trace.sequence_ids)
    one = shown[shown["sequence_id"] == "plain#0"]
    assert "<script>" in "".join(one["text"])
    assert one["entropy_nats"].isna().sum() == 1


def test_windows_of_a_text_are_scored_where_they_count(model_folder: Path, tmp_path: Path) -> None:
    from tracekit.record.recorder import record
    from tracekit.record.sources.text import TextSource

    path = tmp_path / "river.txt"
    path.write_text("the river in the morning and the other thing " * 8, encoding="utf-8")
    for name, window in (("whole", None), ("windows", 60)):
        source = TextSource(str(path), window=window, stride=window and 25)
        record(str(model_folder), source, tmp_path / name)
        plan = make_plan(["h2o:kept=0.5"], vocab=["oracle"], sizes=(16,))
        assert not simulate(tmp_path / name, tmp_path / f"{name}-r", plan).failed
    trace = Trace(tmp_path / "windows")
    kv = read_kv(tmp_path / "windows-r")
    whole = kv[(kv["layer"] == schema.ALL)].set_index("sequence_id")["num_scored"]
    for _, one in trace.sequences.iterrows():
        # Plain text has its eviction point in the middle; a row scores the token after it.
        rows = range(one["num_tokens"] // 2, one["num_tokens"] - 1)
        wanted = sum(row + 1 >= one["scored_from"] for row in rows)
        assert whole[one["sequence_id"]] == wanted
    vocab = read(tmp_path / "windows-r", "vocab")
    num_tokens = int(Trace(tmp_path / "whole").sequences["num_tokens"].iloc[0])
    assert vocab["num_scored"].sum() == num_tokens - 1
    write_report(tmp_path / "windows-r", tmp_path / "report.html")


def test_alibi_is_replayed(tmp_path: Path) -> None:
    from tests import architectures, tiny
    from tracekit.model.load import load_model
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record

    folder = tmp_path / "bloom"
    architectures.model("bloom").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (tmp_path / "p.txt").write_text("the river in the morning\n")
    options = RecordOptions(max_new_tokens=4)
    record(load_model(str(folder)), str(tmp_path / "p.txt"), tmp_path / "t", options)
    assert all(layer.alibi for layer in Trace(tmp_path / "t").spec.layers)
    plan = make_plan(["h2o:kept=0.5", "knorm:kept=0.5", "knorm:kept=1.0"])
    assert not simulate(tmp_path / "t", tmp_path / "r", plan).failed
    kv = read_kv(tmp_path / "r").set_index("target_frac")
    assert (kv.loc[1.0, "output_error"] == 0).all()
    assert (kv.loc[0.5, "output_error"] > 0).any()


def test_steps_add_up_to_all_of_them(results_folder: Path) -> None:
    kv = read(results_folder, "kv")
    by = ["sequence_id", "policy", "layer", "kv_head"]
    whole = kv[kv["steps"] == schema.ANY].set_index(by).sort_index()
    parts = kv[kv["steps"] != schema.ANY]
    weighted = parts.assign(mass=parts["mass_kept"] * parts["num_scored"]).groupby(
        by, observed=True
    )
    assert (weighted["num_scored"].sum() == whole["num_scored"]).all()
    np.testing.assert_allclose(
        weighted["mass"].sum() / whole["num_scored"], whole["mass_kept"], rtol=1e-5
    )


def test_processes_share_the_sequences_and_write_the_same_bytes(
    results_folder: Path, trace_folder: Path, tmp_path: Path
) -> None:
    simulate(trace_folder, tmp_path / "r", make_plan(sizes=(16, 64, 4096)), jobs=2)
    for name in ("kv", "vocab", "attention", "recommended", "summary"):
        one, other = (folder / f"{name}.parquet" for folder in (results_folder, tmp_path / "r"))
        assert one.read_bytes() == other.read_bytes(), name


def test_a_head_file_that_was_edited_is_read_again(trace_folder: Path, tmp_path: Path) -> None:
    spec, file = Trace(trace_folder).spec, tmp_path / "heads.json"
    errors = []
    for first in (1.0, 50.0):
        rows = [[first, *[1.0] * (one.num_kv_heads - 1)] for one in spec.layers]
        file.write_text(json.dumps(rows))
        done = simulate(trace_folder, tmp_path / "r", make_plan([f"headkv:kept=0.3,file={file}"]))
        assert done.num_computed == 5
        errors.append(read_kv(tmp_path / "r")["output_error"].sum())
    assert errors[0] != errors[1]


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        ("headkv:kept=0.5", UsageError, "file= is missing"),
        ("duoattention:kept=0.5,file=/no/such/file.tsv", InputError, "/no/such/file.tsv"),
    ],
)
def test_a_head_file_is_missed_before_anything_is_computed(
    trace_folder: Path, tmp_path: Path, policy: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        simulate(trace_folder, tmp_path / "r", make_plan([policy]))


def test_a_run_says_that_it_is_finished_when_its_tables_are_there_and_not_before(
    trace_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tracekit.simulate.run.collect", stopped)
        with pytest.raises(KeyboardInterrupt):
            simulate(trace_folder, folder, make_plan(["h2o"]))
    assert json.loads((folder / "run.json").read_text())["finished"] is False
    simulate(trace_folder, folder, make_plan(["h2o"]))
    assert json.loads((folder / "run.json").read_text())["finished"] is True


def test_results_of_another_version_are_not_written_over(
    results_folder: Path, trace_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"schema_version": 1}))
    with pytest.raises(InputError, match="results of version 1"):
        simulate(trace_folder, folder, make_plan(["h2o"]))


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"bandwidths": (float("nan"), 1.0)}, {"bandwidths": (1.0, 0.0)}]
)
def test_numbers_that_cannot_be_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_plan(["h2o"], **wrong)


def test_no_processes_are_refused(trace_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="jobs=0"):
        simulate(trace_folder, tmp_path / "r", make_plan(["h2o"]), jobs=0)


def test_a_cell_that_fails_is_named_and_the_others_are_there(
    trace_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: KeyNorm, view: View) -> None:
        raise ArithmeticError("of no use")

    monkeypatch.setattr(KeyNorm, "score", fail)
    done = simulate(trace_folder, tmp_path / "r", make_plan(["h2o:kept=0.5", "knorm:kept=0.5"]))
    assert {one["cell"].split(" on ")[0] for one in done.failed} == {"knorm"}
    assert {one["why"] for one in done.failed} == {"ArithmeticError: of no use"}
    assert len(done.failed) == done.num_computed == 5
    assert set(read_kv(tmp_path / "r")["family"]) == {"h2o"}
