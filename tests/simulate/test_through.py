"""Level propagated, from a recorded tiny model to rows of results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from tests import architectures, tiny
from tests.conftest import PROMPTS
from tests.live.dropping import Dropping, HeavyHitters, LastRow, Rule, Streaming
from tests.record.test_kld import write_kld
from tracekit import schema
from tracekit.errors import InputError, ModelError, TraceError
from tracekit.kv.parse import parse
from tracekit.kv.scorers.key_norm import KeyNorm
from tracekit.model.load import load_model
from tracekit.progress import Silent
from tracekit.record.kld import import_kld
from tracekit.record.options import RecordOptions
from tracekit.record.probe_options import ProbeOptions
from tracekit.record.prompts import read_prompts
from tracekit.record.recorder import record
from tracekit.record.sources.prompts import PromptSource
from tracekit.record.sources.text import TextSource
from tracekit.simulate import levels
from tracekit.simulate.columns import LOCAL
from tracekit.simulate.plan import Inside, make_plan
from tracekit.simulate.questions import questions
from tracekit.simulate.rerun import rerun
from tracekit.simulate.results import Cells
from tracekit.simulate.run import Simulated, simulate
from tracekit.simulate.through import run_through
from tracekit.simulate.work import Worker
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tracekit.kv.view import View
    from tracekit.model.load import LoadedModel

NEW_TOKENS = 10
LEVELS = ("local", "predicted", "propagated")
MEASURED = ("kl_nats", "jsd_nats", "nll_full", "nll_pruned", "same_top_frac", "noise_kl_nats")
FORETOLD = ("kl_predicted_nats", "kl_predicted_se_nats")

MARKED = {
    "id": "marked",
    "domain": "retrieval",
    "text": "The code is nine. On and on the river went to the sea, and the code was nine then.",
    "spans": [
        {"kind": "needle", "text": "The code is nine."},
        {"kind": "answer", "text": "was nine"},
    ],
}

RULES: dict[str, Rule] = {
    "h2o:kept=0.5,every=4": HeavyHitters(kept_frac=0.5, every=4),
    "h2o:kept=0.3,every=1": HeavyHitters(kept_frac=0.3, every=1),
    "streaming:kept=0.4": Streaming(kept_frac=0.4),
    "tova:kept=0.5": LastRow(kept_frac=0.5),
    "tova:kept=0.25": LastRow(kept_frac=0.25),
}


def save_model(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Write a model whose attention is far from even, and return its folder."""
    architectures.model(name, initializer_range=0.3).to(dtype).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("lively") / "tiny")


@pytest.fixture(scope="module")
def loaded(lively: Path) -> LoadedModel:
    return load_model(str(lively))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marked") / "some.jsonl"
    lines = [json.dumps(one) + "\n" for one in [*PROMPTS, MARKED]]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def recorded(lively: Path, prompts: Path, out: Path, capture: str, **more: Any) -> Path:
    options = RecordOptions(max_new_tokens=NEW_TOKENS, capture=capture, **more)
    assert not record(str(lively), str(prompts), out, options).skipped
    return out


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, lively: Path, prompts: Path) -> Path:
    out = tmp_path_factory.mktemp("propagated") / "t"
    probes = ProbeOptions(number=2, dtype="float32")
    return recorded(lively, prompts, out, "influence", probes=probes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, lively: Path, prompts: Path) -> Path:
    """Return a trace of the same that holds nothing but token ids and numbers."""
    return recorded(lively, prompts, tmp_path_factory.mktemp("steps") / "t", "steps")


def through(
    trace: Path, out: Path, kv: Sequence[str], levels: Sequence[str] = ("propagated",), **more: Any
) -> Simulated:
    jobs = more.pop("jobs", 1)
    return simulate(trace, out, make_plan(list(kv), levels=levels, **more), jobs=jobs)


def read(folder: Path, name: str = "kv") -> pd.DataFrame:
    frame: pd.DataFrame = pq.read_table(folder / f"{name}.parquet").to_pandas()
    return frame


def whole(kv: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of all layers and steps, by sequence and policy."""
    rows = kv[(kv["layer"] == schema.ALL) & (kv["steps"] == schema.ANY)]
    return rows.set_index(["sequence_id", "policy"]).sort_index()


def ids_of(trace: Trace, sequence_id: str) -> list[int]:
    return trace.table("tokens", sequence_id=sequence_id)["token_id"].tolist()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, trace: Path) -> Path:
    out = tmp_path_factory.mktemp("results") / "r"
    assert not through(trace, out, [*RULES, "full", "snapkv:kept=0.3,window=4"], LEVELS).failed
    return out


@pytest.mark.parametrize("text", RULES)
def test_rows_are_those_of_a_decoder_that_really_drops_entries(
    text: str, results: Path, trace: Path, loaded: LoadedModel
) -> None:
    kv, opened = read(results), Trace(trace)
    found = whole(kv[kv["level"] == "propagated"])
    for _, row in opened.sequences.iterrows():
        ids = ids_of(opened, row["sequence_id"])
        point = row["prompt_end"]
        point = len(ids) // 2 if np.isnan(point) else int(point)
        with torch.no_grad():
            full_TV = loaded.model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        decoder, kl, nll, same, kept = Dropping(loaded.model, RULES[text]), [], [], [], []
        head = loaded.model.get_output_embeddings()
        for t, hidden_1E in enumerate(decoder.rows(ids[:-1], point), start=point):
            with torch.no_grad():
                logq_V = head(hidden_1E)[0].double().log_softmax(-1)
            logp_V = full_TV[t]
            kl.append(float((logp_V.exp() * (logp_V - logq_V)).sum()))
            nll.append((-float(logp_V[ids[t + 1]]), -float(logq_V[ids[t + 1]])))
            same.append(int(logp_V.argmax()) == int(logq_V.argmax()))
            held = [one.position_GK.shape[1] for one in decoder.layers.values()]
            kept.append(sum(held) / len(held) / (t + 1))
        one = found.loc[(row["sequence_id"], parse(text).text)]
        assert one["num_scored"] == len(kl) == len(ids) - 1 - point
        assert one["kl_nats"] == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-8)
        assert one["nll_full"] == pytest.approx(np.mean(nll, axis=0)[0], rel=1e-5)
        assert one["nll_pruned"] == pytest.approx(np.mean(nll, axis=0)[1], rel=1e-4)
        assert one["same_top_frac"] == pytest.approx(np.mean(same))
        assert one["kept_frac"] == pytest.approx(np.mean(kept), rel=1e-6)
        assert one["kept_end_frac"] == pytest.approx(kept[-1], rel=1e-6)


def test_each_level_has_its_own_columns_and_null_for_those_of_others(results: Path) -> None:
    table = pq.read_table(results / "kv.parquet")
    for name in (*LOCAL, *MEASURED, *FORETOLD):
        assert not pc.any(pc.is_nan(table[name])).as_py(), name
    kv = table.to_pandas()
    assert set(kv["level"]) == set(LEVELS)
    by_level = {level: kv[kv["level"] == level] for level in LEVELS}
    nulls = {
        "local": (*MEASURED, *FORETOLD),
        "predicted": (*LOCAL, *MEASURED),
        "propagated": (*LOCAL, *FORETOLD),
    }
    for level, names in nulls.items():
        assert by_level[level][list(names)].isna().all(axis=None)
    told = by_level["propagated"]
    of_all = told["layer"] == schema.ALL
    assert told.loc[of_all, list(MEASURED)].notna().all(axis=None)
    assert told.loc[~of_all, list(MEASURED)].isna().all(axis=None)
    for name in ("kept_frac", "kv_bytes", "num_evicted", "read_frac", "is_idle"):
        assert told[name].notna().all()
    assert len(set(map(len, by_level.values()))) == 1


def test_what_is_held_is_what_level_local_holds_where_the_prompt_alone_decides(
    trace: Path, tmp_path: Path
) -> None:
    kv = ["random", "adakv:window=2", "int4", "streaming:every=3,from=prompt", "pyramidkv"]
    kv += ["knorm:kept=3tok,recent=8,at=0.3", "knorm:kept=70tok"]
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps([[90, 90], [90, 90], [1, 2], [3, 1]]))
    kv.append(f"headkv:window=2,file={heads}")
    assert not through(trace, tmp_path / "r", kv, ["local", "propagated"], kept=(0.2, 0.6)).failed
    rows = read(tmp_path / "r")
    by = ["sequence_id", "policy", "layer", "kv_head", "steps"]
    local, told = (
        rows[rows["level"] == level].set_index(by).sort_index() for level in ("local", "propagated")
    )
    assert told.index.equals(local.index)
    for name in set(rows) - {*by, *LOCAL, *MEASURED, *FORETOLD, "level"}:
        pd.testing.assert_series_equal(told[name], local[name], check_exact=True)
    assert told["is_clipped"].any()
    assert told["is_clamped"].any()


def test_a_trace_of_numbers_alone_is_enough(results: Path, small: Path, tmp_path: Path) -> None:
    assert not through(small, tmp_path / "r", [*RULES, "full"]).failed
    mine, theirs = read(tmp_path / "r"), read(results)
    theirs = theirs[(theirs["level"] == "propagated") & theirs["policy"].isin(set(mine["policy"]))]
    for name in set(mine) - {"policy", "family"}:
        pd.testing.assert_series_equal(
            mine[name].reset_index(drop=True),
            theirs[name].reset_index(drop=True),
            check_categorical=False,
        )


def test_steps_add_up_to_all_of_them_and_are_those_of_the_logits_table(results: Path) -> None:
    kv, logits = read(results), read(results, "logits")
    told = kv[(kv["level"] == "propagated") & (kv["layer"] == schema.ALL)]
    by = ["sequence_id", "policy"]
    steps = logits.groupby(by, observed=True)
    parts = told[told["steps"] != schema.ANY]
    for name in ("kl_nats", "jsd_nats", "nll_full", "nll_pruned"):
        mean = whole(told)[name]
        np.testing.assert_allclose(steps[name].mean().sort_index(), mean, rtol=1e-5, atol=1e-12)
        total = (parts[name] * parts["num_scored"]).groupby(
            [parts[one] for one in by], observed=True
        )
        np.testing.assert_allclose(
            total.sum().sort_index() / whole(told)["num_scored"], mean, rtol=1e-5, atol=1e-12
        )
    assert (steps["distance"].min() == 1).all()
    assert (steps.size().sort_index() == whole(told)["num_scored"]).all()


def test_the_full_cache_is_the_noise_floor(results: Path) -> None:
    kv = read(results)
    told = whole(kv[kv["level"] == "propagated"])
    full = told[told["family"] == "full"]
    assert np.allclose(full["kl_nats"], full["noise_kl_nats"], atol=1e-9)
    assert told["noise_kl_nats"].between(0, 1e-9).all()
    assert (full["same_top_frac"] == 1).all()
    assert (full["kept_frac"] == 1).all()
    others = told[~told["family"].isin(["full"])]
    assert (others["kl_nats"] > 1e3 * others["noise_kl_nats"]).all()


@pytest.mark.parametrize("text", ["h2o:kept=4000tok", "knorm:kept=1.0", "streaming:kept=4000tok"])
def test_a_budget_that_evicts_nothing_is_idle_and_loses_nothing(
    text: str, small: Path, tmp_path: Path
) -> None:
    assert not through(small, tmp_path / "r", [text]).failed
    kv = read(tmp_path / "r")
    assert kv["is_idle"].all()
    assert (kv["num_evicted"] == 0).all()
    assert (kv["kept_frac"] == 1).all()
    assert (whole(kv)["kl_nats"] < 1e-9).all()


def test_a_sequence_of_one_token_has_no_row_and_is_named(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Trace.table

    def table(self: Trace, name: str, **more: Any) -> pd.DataFrame:
        return own(self, name, **more)[: 1 if more.get("sequence_id") == "plain#0" else None]

    monkeypatch.setattr(Trace, "table", table)
    plan = make_plan(["h2o:kept=0.5", "full"], levels=["propagated"])
    done = Worker(Trace(small), Cells(tmp_path), plan, Silent()).sequence("plain#0")
    assert not done.failed
    assert done.num_computed == 0
    assert {one["what"] for one in done.skipped} == {"h2o", "full"}
    assert all("nothing to score after it" in one["why"] for one in done.skipped)
    assert done.keys == {"kv": [], "logits": []}


def test_another_model_is_refused_by_its_fingerprint_in_one_sentence(
    small: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", "qwen3")
    with pytest.raises(ModelError, match="is not the model of the trace") as refused:
        through(small, tmp_path / "r", ["h2o:kept=0.5"], inside=Inside(model=str(other)))
    assert ". " not in str(refused.value)
    with pytest.raises(InputError, match="no"):
        through(small, tmp_path / "r", ["h2o:kept=0.5"], inside=Inside(model=str(tmp_path / "no")))


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_a_model_that_attends_by_itself_is_refused_before_anything_is_run(
    name: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / name, name)
    (tmp_path / "p.txt").write_text("the river in the morning\n")
    recorded(model, tmp_path / "p.txt", tmp_path / "t", "steps")
    with pytest.raises(ModelError, match=r"attends by itself.*--level local"):
        through(tmp_path / "t", tmp_path / "r", ["h2o:kept=0.5"])


def test_a_model_with_a_state_beside_its_cache_is_refused(small: Path, loaded: LoadedModel) -> None:
    """As models that mix attention and a recurrence in one layer have it."""
    opened = Trace(small)
    again = rerun(opened, loaded, opened.sequences.iloc[0], seed=0)
    assert again is not None
    last = loaded.model.model.layers[3]
    handle = last.register_forward_hook(lambda _, args, output: output + output.cumsum(1))
    try:
        with pytest.raises(ModelError, match="holds a state that is no cache entry"):
            list(run_through(again, {"a": [parse("h2o:kept=0.5")]}, "tracekit"))
    finally:
        handle.remove()


def broken(monkeypatch: pytest.MonkeyPatch, sequence_id: str, token_id: int) -> None:
    """Let a trace hold a token that it should not."""
    own = Trace.table

    def table(self: Trace, name: str, **more: Any) -> pd.DataFrame:
        frame = own(self, name, **more)
        if name == "tokens" and more.get("sequence_id") == sequence_id:
            frame = frame.copy()
            frame.loc[frame.index[3], "token_id"] = token_id
        return frame

    monkeypatch.setattr(Trace, "table", table)


@pytest.mark.parametrize("token_id", [272, 4000, -1])
def test_a_token_that_is_none_of_the_models_fails_its_sequence_and_no_other(
    token_id: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, "plain#0", token_id)
    opened, plan = Trace(small), make_plan(["h2o:kept=0.5", "full"], levels=["propagated"])
    (question,) = questions(opened, plan, Silent())
    for _, row in opened.sequences.iterrows():
        answers = question.answer(row, question.cells)
        is_broken = row["sequence_id"] == "plain#0"
        assert set(answers.failed if is_broken else answers.made) == set(question.cells)
        for why in answers.failed.values():
            assert why.startswith(f"plain#0 has token {token_id}, but")
            assert why.endswith("the trace does not belong to this model.")


def test_what_fails_around_the_families_of_a_point_loses_its_sequence_alone(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = run_through

    def failing(again: Any, *args: Any) -> Any:
        made = own(again, *args)
        yield next(made)
        if again.recorded.sequence_id == "raw#0":
            msg = "no memory"
            raise MemoryError(msg)
        yield from made

    monkeypatch.setattr(levels, "run_through", failing)
    done = through(small, tmp_path / "r", ["h2o:kept=0.5", "full"])
    assert [one["why"] for one in done.failed] == ["MemoryError: no memory"]
    assert done.failed[0]["cell"].endswith("raw#0")
    assert done.num_computed == 2 * len([*PROMPTS, MARKED]) - 1


def test_a_family_that_fails_is_named_and_the_others_are_there(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: KeyNorm, view: View) -> None:
        raise ArithmeticError("of no use")

    monkeypatch.setattr(KeyNorm, "score", fail)
    done = through(small, tmp_path / "r", ["h2o:kept=0.5", "knorm:kept=0.5", "influence:kept=0.4"])
    whys = {one["cell"].split(" on ")[0]: one["why"] for one in done.failed}
    assert whys["knorm"] == "ArithmeticError: of no use"
    assert "influence probes" in whys["influence"]
    assert len(done.failed) == 2 * done.num_computed == 2 * len([*PROMPTS, MARKED])
    assert set(read(tmp_path / "r")["family"]) == {parse("h2o:kept=0.5").family}


def test_a_head_file_of_zeros_is_refused_before_anything_is_run(
    small: Path, tmp_path: Path
) -> None:
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps([[0, 0]] * 4))
    with pytest.raises(InputError, match=r"heads\.json has no number above 0"):
        through(small, tmp_path / "r", ["h2o:kept=0.5", f"headkv:kept=0.3,file={heads}"])


def test_a_policy_that_the_model_refuses_loses_no_other(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", "gemma3n")
    (tmp_path / "p.txt").write_text("the river in the morning\n")
    recorded(model, tmp_path / "p.txt", tmp_path / "t", "steps")
    done = through(tmp_path / "t", tmp_path / "r", ["h2o:kept=0.5", "full:kept=1.0+int4"])
    assert all("read the keys of others" in one["why"] for one in done.failed)
    assert {one["cell"].split(" on ")[0] for one in done.failed} == {"int4"}
    kv = read(tmp_path / "r")
    assert set(kv["layer"]) == {schema.ALL, 0, 1}
    assert {"h2o"} <= {str(one).split(":")[0] for one in kv["family"]}


def test_finished_cells_are_found_and_the_same_bytes_are_written(
    small: Path, tmp_path: Path
) -> None:
    kv = ["h2o:kept=0.5,every=4", "random:kept=0.3"]
    num = len(kv) * len([*PROMPTS, MARKED])
    assert through(small, tmp_path / "a", kv).num_computed == num
    names = ("kv", "logits", "logit_stats", "summary")
    bytes_of = {name: (tmp_path / "a" / f"{name}.parquet").read_bytes() for name in names}
    again = through(small, tmp_path / "a", kv)
    assert (again.num_computed, again.num_found) == (0, num)
    cells = sorted(one for one in (tmp_path / "a" / "cells").iterdir() if "-" not in one.name)
    for path in cells[::3]:
        path.unlink()
    assert through(small, tmp_path / "a", kv).num_computed == len(cells[::3])
    through(small, tmp_path / "b", kv, jobs=2)
    for folder in ("a", "b"):
        for name in names:
            found = (tmp_path / folder / f"{name}.parquet").read_bytes()
            assert found == bytes_of[name], (folder, name)


def test_another_convention_is_another_cell(small: Path, tmp_path: Path) -> None:
    num = len([*PROMPTS, MARKED])
    for convention in ("tracekit", "llama.cpp"):
        inside = Inside(convention=convention)
        assert through(small, tmp_path / "r", ["h2o:kept=0.5"], inside=inside).num_computed == num
        stats = read(tmp_path / "r", "logit_stats")
        assert set(stats["convention"]) == {convention}
        assert stats["error"].notna().any() == (convention == "llama.cpp")


def test_in_half_precision_every_cell_has_its_own_noise(prompts: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", dtype=torch.bfloat16)
    options = RecordOptions(max_new_tokens=NEW_TOKENS, capture="steps")
    loaded = load_model(str(model), dtype="bfloat16")
    source = PromptSource(read_prompts(str(prompts)), limit=2)
    record(loaded, source, tmp_path / "t", options)
    assert Trace(tmp_path / "t").spec.dtype == "bfloat16"
    kv = ["h2o:kept=0.4,every=1", "knorm:kept=0.5", "streaming:kept=0.5", "full"]
    inside = Inside(model=str(model))
    for name in ("a", "b"):
        assert not through(tmp_path / "t", tmp_path / name, kv, inside=inside).failed
    noise = whole(read(tmp_path / "a"))["noise_kl_nats"]
    assert np.isfinite(noise).all()
    assert (noise > 0).all()
    assert (tmp_path / "a" / "kv.parquet").read_bytes() == (
        tmp_path / "b" / "kv.parquet"
    ).read_bytes()


def test_tokens_of_windows_are_scored_once(lively: Path, tmp_path: Path) -> None:
    path = tmp_path / "river.txt"
    path.write_text("the river in the morning and the other thing " * 6, encoding="utf-8")
    options = RecordOptions(capture="steps")
    record(str(lively), TextSource(str(path), window=60, stride=25), tmp_path / "t", options)
    assert not through(tmp_path / "t", tmp_path / "r", ["h2o:kept=0.5,every=4"]).failed
    logits, opened = read(tmp_path / "r", "logits"), Trace(tmp_path / "t")
    assert len(opened.sequences) > 2
    scored = []
    for _, row in opened.sequences.iterrows():
        own = logits[logits["sequence_id"] == row["sequence_id"]]
        point = row["num_tokens"] // 2
        first = max(point + 1, row["scored_from"])
        assert own["position"].tolist() == list(range(first, row["num_tokens"]))
        assert own["distance"].tolist() == [one - point for one in own["position"]]
        scored += [row["text_start"] + one for one in own["position"]]
    assert len(scored) == len(set(scored))


def test_tokens_of_needles_and_answers_are_told(trace: Path, tmp_path: Path) -> None:
    assert not through(trace, tmp_path / "r", ["h2o:kept=0.5,at=0.3"]).failed
    logits, opened = read(tmp_path / "r", "logits"), Trace(trace)
    tokens = opened.table("tokens", sequence_id="marked#0")
    ids, spans = tokens["token_id"].tolist(), tokens["span"].astype(object).tolist()
    needle = {one for one, span in zip(ids, spans, strict=True) if span == "needle"}
    own = logits[logits["sequence_id"] == "marked#0"]
    for _, step in own.iterrows():
        assert step["is_answer"] == (spans[step["position"]] == "answer")
        # What stands first in a text follows nothing: it never is a target.
        if ids[step["position"]] != ids[0]:
            assert step["is_needle"] == (ids[step["position"]] in needle)
    assert 0 < own["is_answer"].sum() == spans.count("answer")
    assert 0 < own["is_needle"].sum() < len(own)
    kv = whole(read(tmp_path / "r"))
    kept = kv["needle_kept"].droplevel("policy")
    assert 0 < kept["marked#0"] < 1
    assert kept.drop("marked#0").isna().all()
    stats = read(tmp_path / "r", "logit_stats")
    assert {"in the needle", "elsewhere"} == set(stats.loc[stats["grouping"] == "needle", "group"])
    hits = own.loc[own["is_answer"], "hit_full"]
    match = stats[(stats["grouping"] == "all") & (stats["statistic"] == "exact_match_full")].iloc[0]
    assert match["value"] == float(hits.all())
    assert match["n"] == 1


def test_surprisal_under_the_llama_cpp_convention_is_that_of_its_base_file(
    lively: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    path, num_ctx = tmp_path / "river.txt", 24
    path.write_text("the river in the morning and the other thing " * 3, encoding="utf-8")
    source = TextSource(str(path), window=num_ctx)
    record(str(lively), source, tmp_path / "t", RecordOptions(capture="steps"))
    opened = Trace(tmp_path / "t")
    names = [
        row["sequence_id"] for _, row in opened.sequences.iterrows() if row["num_tokens"] == num_ctx
    ]
    tokens = [ids_of(opened, name) for name in names]
    with torch.no_grad():
        logits = [loaded.model(torch.tensor([one])).logits[0].numpy() for one in tokens]
    write_kld(tmp_path / "base.kld", tokens, logits)
    import_kld(tmp_path / "base.kld", loaded, tmp_path / "k")
    steps = Trace(tmp_path / "k").table("steps")
    inside = Inside(convention="llama.cpp")
    assert not through(
        tmp_path / "t", tmp_path / "r", ["full", "h2o:kept=0.5"], inside=inside
    ).failed
    found = read(tmp_path / "r", "logits")
    for chunk, name in enumerate(names):
        theirs = steps[steps["sequence_id"] == f"chunk-{chunk:04d}#0"]
        for _, own in found[found["sequence_id"] == name].groupby("family", observed=True):
            assert own["position"].tolist() == theirs["position"].tolist()
            np.testing.assert_allclose(own["nll_full"], theirs["surprisal_nats"], atol=2e-4)
    # The base passes through 16 bits, what is compared with it does not: KL of equals is not 0.
    equal = found[found["family"].astype(str).str.startswith("full")]
    assert (equal["kl_nats"] != 0).any()
    assert equal["kl_nats"].abs().max() < 1e-3


def test_a_policy_of_probes_is_run_where_they_were_recorded(trace: Path, tmp_path: Path) -> None:
    done = through(trace, tmp_path / "r", ["influence:kept=0.4", "oracle_error:kept=0.4"])
    assert not done.failed
    kv = whole(read(tmp_path / "r"))
    assert not kv["causal"].any()
    assert (kv["kl_nats"] > 0).all()


def test_recall_policies_and_transforms_are_run_at_several_amounts(
    small: Path, tmp_path: Path
) -> None:
    kv = ["h2o:every=4+int4:group=2,residual=3", "quest:page=3", "full+lowrank:rank=2,residual=4"]
    done = through(small, tmp_path / "r", kv, kept=(0.4, 0.8))
    assert not done.failed
    rows = whole(read(tmp_path / "r"))
    selecting = rows[rows["selects"]]
    assert (selecting["kept_frac"] == 1).all()
    assert (selecting["read_frac"] < 1).any()
    assert (rows["kl_nats"] > 0).all()


def test_amounts_that_come_in_batches_are_the_same_as_all_at_once(
    small: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tracekit.live import driver

    opened = Trace(small)
    again = rerun(opened, loaded, opened.sequences.iloc[0], seed=0)
    assert again is not None
    family = [parse(f"h2o:kept={kept},every=4") for kept in (0.2, 0.4, 0.6)]

    def kl() -> Any:
        ((_, made),) = run_through(again, {"h2o": family}, "tracekit")
        return made()["logits"]["kl_nats"].to_numpy()

    together = kl()
    monkeypatch.setattr(driver, "ROWS_AT_ONCE", 1)
    np.testing.assert_allclose(kl(), together, rtol=1e-3, atol=1e-7)


def test_an_imported_base_file_is_run_like_any_other_trace(
    lively: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    tokens = [np.random.default_rng(n).integers(3, 260, 16).tolist() for n in range(2)]
    with torch.no_grad():
        logits = [loaded.model(torch.tensor([one])).logits[0].numpy() for one in tokens]
    write_kld(tmp_path / "base.kld", tokens, logits)
    import_kld(tmp_path / "base.kld", loaded, tmp_path / "k")
    done = through(
        tmp_path / "k", tmp_path / "r", ["h2o:kept=0.5"], inside=Inside(model=str(lively))
    )
    assert not done.failed
    assert (whole(read(tmp_path / "r"))["num_scored"] == 16 - 1 - 8).all()


def test_level_predicted_without_probes_is_refused_though_the_model_is_there(
    small: Path, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match="--capture"):
        through(small, tmp_path / "r", ["h2o:kept=0.5"], LEVELS)
