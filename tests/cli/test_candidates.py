"""``tracekit show RESULTS --vocab``, and what ``tracekit show RESULTS`` says of candidate sets."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from tracekit import schema
from tracekit.cli.attended import read_attended
from tracekit.cli.candidate_rows import brief_table, gain_tables
from tracekit.cli.candidates import read_vocab
from tracekit.cli.output import WIDTH
from tracekit.cli.policy_stats import read_policy
from tracekit.cli.results import read_results
from tracekit.cli.verdicts import read_verdicts
from tracekit.errors import InputError, UsageError
from tracekit.measure.ceiling import ceiling
from tracekit.measure.stats import bootstrap_mean
from tracekit.simulate.controller_gains import gains
from tracekit.simulate.folder import _KEYS, _ROW_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLD = (
    schema.CANDIDATE_STATS,
    schema.MISSES,
    schema.MISS_CLASSES,
    schema.BATCH_UNIONS,
    schema.VERDICTS,
    schema.HEAD_TIMES,
)


def fits(text: str) -> bool:
    return max(map(cell_len, text.splitlines())) <= WIDTH


def flat(text: str) -> str:
    return " ".join(text.split())


def verdict(**columns: Any) -> dict[str, Any]:
    row = {column.name: None for column in schema.VERDICTS.columns}
    kept = {
        "domain": "story",
        "hit_level": 0.99,
        "verdict": "kept",
        "estimator": "previous:top=256",
        "controller": "fixed",
        "fit": "asked",
        "size": 64,
        "hit_argmax": 0.995,
        "low": 0.991,
        "high": 0.999,
        "n": 9,
        "num_steps": 500,
        "n_choosing": 10,
        "hit_choosing": 0.9961,
        "low_choosing": 0.992,
        "steps_needed": 300,
        "cost_frac": 0.25,
        "set_size_mean": 70.0,
        "why": "kept: the lower end of the interval is 0.992 and 0.991",
    }
    return row | kept | columns


def with_verdicts(folder: Path, out: Path, *rows: dict[str, Any]) -> Path:
    """Return a copy of results with these verdicts, and a head that is half of the model."""
    shutil.copytree(folder, out)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(schema.VERDICTS.build(len(rows), columns), out / "verdicts.parquet")
    times = pq.read_table(out / "head_times.parquet").to_pydict() | {"head_share": 0.5}
    pq.write_table(schema.HEAD_TIMES.build(len(times["size"]), times), out / "head_times.parquet")
    return out


def test_a_run_with_candidate_sets_writes_what_is_told_of_them(results_folder: Path) -> None:
    for table in TOLD:
        rows = pq.read_table(results_folder / f"{table.name}.parquet")
        assert rows.schema.equals(table.schema)
        assert rows.num_rows
    assert not (results_folder / "candidate_sets.parquet").exists()


def test_results_end_with_verdicts_and_say_where_to_look_next(results_folder: Path) -> None:
    data, text = read_results(results_folder)
    told = text.split("candidate sets of 64 tokens of 16, 64, 4096 asked")[1]
    assert "previous" in told
    assert "ceiling: how many times faster" in flat(told)
    assert "rows gathered and multiplied in" in told
    assert "too few prompts for a verdict (choosing + judging): all 3 + 2, dialogue 1 + 1" in told
    assert "--vocab SCHEME" in told
    assert "vocab, level local" not in text
    assert fits("\n".join(text.splitlines()[1:]))
    assert {row["domain"] for row in data["verdicts"]} >= {"all", "story"}
    json.dumps(data)


def test_a_verdict_names_what_keeps_the_level_with_its_evidence_and_ceiling(
    results_folder: Path, tmp_path: Path
) -> None:
    unsuited = "not suitable: nothing keeps 99 % for less than the full head"
    unkept = "not kept on the other half: the lower end of the interval is 0.992 and 0.9"
    nothing = "nothing to judge: no estimator that a decoder could run was tried"
    rows = (
        verdict(),
        verdict(domain="code", verdict="not suitable", why=unsuited, hit_argmax=0.9),
        verdict(domain="poem", verdict="nothing to judge", why=nothing, estimator=None),
        verdict(domain="essay", verdict="too few prompts", n=2, n_choosing=3),
        verdict(domain="song", verdict="not kept on the other half", low=0.9, why=unkept),
    )
    found, text = read_verdicts(with_verdicts(results_folder, tmp_path / "r", *rows))
    told = flat(text)
    assert len(found) == len(rows)
    assert (
        "story, 99 % of most likely tokens: kept: the lower end of the interval is 0.992 and 0.991; "
        "previous:top=256 at 64: hit_argmax 0.995 [0.991, 0.999] on n = 9 prompts that judge, 0.9961 on "
        f"n = 10 that choose, cost_frac 0.25, ceiling {ceiling(0.5, 0.25):.3g}." in told
    )
    assert f"code, 99 % of most likely tokens: {unsuited}; the best is previous:top=256" in told
    assert f"poem, 99 % of most likely tokens: {nothing}." in told
    assert f"song, 99 % of most likely tokens: {unkept}; previous:top=256 at 64" in told
    assert "too few prompts for a verdict (choosing + judging): essay 3 + 2." in told
    assert fits(text)


LONG = "previous:top=7@rate:gain=3.125,level=0.0625,window=9@fallback:confidence=0.03125"

RUN = (
    dict.fromkeys(_KEYS[""])
    | {part: dict.fromkeys(_KEYS[part]) for part in ("trace", "plan")}
    | {part: [] for part in _ROW_KEYS}
    | {"schema_version": schema.RESULTS_VERSION, "seed": 0}
)


@pytest.fixture(scope="module")
def adapted(trace_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results of a controller, beside its fixed set, a bound, and a long name."""
    from tracekit.simulate.plan import make_plan
    from tracekit.simulate.run import simulate

    schemes = ["previous", "oracle", "previous@rate", "previous:top=3+frequency@fallback", LONG]
    out = tmp_path_factory.mktemp("adapted") / "r"
    simulate(trace_folder, out, make_plan(vocab=schemes, sizes=(4, 8, 16)))
    return out


def lines_of(text: str) -> list[list[str]]:
    """Return the cells of the first table of a text, by line."""
    rows = text.split("\u2500\n", 1)[1].split("\n\n", 1)[0]
    return [line.split() for line in rows.splitlines()]


def test_schemes_are_compared_at_the_middle_size_the_best_first(adapted: Path) -> None:
    text = read_verdicts(adapted)[1]
    assert text.splitlines()[0] == (
        "candidate sets of 8 tokens of 4, 8, 16 asked, all steps alike, level local"
    )
    stats = pq.read_table(adapted / "candidate_stats.parquet").to_pylist()
    hits = [
        row["value"]
        for row in stats
        if (row["grouping"], row["statistic"], row["size"]) == ("all", "hit_argmax", 8)
        and row["fit"] in ("asked", "others")
    ]
    lines = [line for line in lines_of(text) if len(line) > 3]
    assert len(lines) == len(hits) == 5
    shown = [float(next(one for one in line if one[0] in "01")) for line in lines]
    assert shown == [pytest.approx(one, abs=6e-4) for one in sorted(hits, reverse=True)]
    assert fits(text)


def test_names_leave_out_what_is_usual_and_mark_bounds(adapted: Path) -> None:
    lines = lines_of(read_verdicts(adapted)[1])
    assert ["oracle", "(bound)"] in [line[:2] for line in lines]
    names = {line[0] for line in lines}
    assert {"previous", "previous@rate"} <= names
    joined = "".join(line[0] for line in lines)
    assert "previous:top=3+frequency@fallback" in joined
    assert LONG in joined


def test_a_size_is_chosen_or_refused(adapted: Path) -> None:
    assert "candidate sets of 16 tokens of 4, 8, 16 asked" in read_verdicts(adapted, 16)[1]
    assert "candidate sets of 16 tokens of 4, 8, 16 asked" in read_results(adapted, 16)[1]
    with pytest.raises(InputError, match="no sets of 5 tokens: choose one of 4, 8, 16"):
        read_results(adapted, 5)


def test_a_controller_is_compared_with_a_fixed_set_pair_by_pair(adapted: Path) -> None:
    data, text = read_vocab(adapted, "previous@rate", None, "all")
    rows = pq.read_table(adapted / "vocab.parquet").to_pandas()
    rows = rows[rows["estimator"] == "previous:top=256"]
    assert len(data["gains"]) == 3 * 3
    for told in data["gains"]:
        measure = told["measure"]
        own = rows[(rows["size"] == told["size"]) & (rows["fit"] == "own")]
        for baseline, fit in (("fixed", "asked"), ("shuffled", "shuffled")):
            other = rows[(rows["size"] == told["size"]) & (rows["fit"] == fit)]
            pairs = own.merge(other, on="sequence_id", suffixes=("", "_other"))
            weights, ones = pairs["num_scored"].to_numpy(), pairs[measure].to_numpy(float)
            twos = pairs[f"{measure}_other"].to_numpy(float)
            if measure == "hit_argmax":
                ones, twos = (np.rint(one * weights) / weights for one in (ones, twos))
            change = bootstrap_mean(ones - twos, seed=0, weights=weights)
            assert told[f"own_minus_{baseline}"] == pytest.approx(change.mean)
            assert told[f"low_{baseline}"] == pytest.approx(change.low)
            assert told[f"high_{baseline}"] == pytest.approx(change.high)
            assert told[f"n_{baseline}"] == change.n == 5
            assert told[baseline] == pytest.approx((twos * weights).sum() / weights.sum())
        assert told["own"] == pytest.approx((ones * weights).sum() / weights.sum())
        assert told["others"] is not None
        assert {told[f"num_sequences_{fit}"] for fit in ("fixed", "others", "own")} == {5}
    assert "hindsight" in text
    assert "own - shuffled" in text
    assert fits(text)
    one = read_vocab(adapted, "previous@rate", 8, "all")[0]["gains"]
    assert one == [row for row in data["gains"] if row["size"] == 8]
    assert "gains" not in read_vocab(adapted, "previous@rate", 8, "domain")[0]
    assert "gains" not in read_vocab(adapted, "previous", 8, "all")[0]


def result(fit: str, sequence: str, hit: float, num_scored: int) -> dict[str, Any]:
    """Return a row as a float32 column gives it back."""
    return {
        "sequence_id": sequence,
        "fit": fit,
        "size": 8,
        "hit_argmax": float(np.float32(hit)),
        "neg_log_mass_nats": 0.5,
        "set_size_mean": 8.0,
        "num_scored": num_scored,
    }


def test_as_many_hits_are_no_gain_in_spite_of_single_precision() -> None:
    shares = {"a": (7 / 9, 8 / 9), "b": (8 / 9, 7 / 9), "c": (1 / 3, 1 / 3)}
    own = [result("own", name, pair[0], 9) for name, pair in shares.items()]
    fixed = [result("asked", name, pair[1], 9) for name, pair in shares.items()]
    told = gains(own, fixed, seed=0)
    assert told[0]["measure"] == "hit_argmax"
    assert told[0]["own"] == pytest.approx(2 / 3, abs=1e-15)
    assert told[0]["own_minus_fixed"] == 0
    same = gains(own, own, seed=0)[0]
    assert same["low_fixed"] == same["high_fixed"] == 0
    means = [line.split() for line in gain_tables(told)[1].splitlines()]
    fits = [text for fit in ("fixed", "others", "own", "shuffled") for text in (fit, "n")]
    assert ["measure", "size", *fits] in means
    assert ["hit_argmax", "8", "0.6667", "3", "-", "0", "0.6667", "3", "-", "0"] in means


def lines_of_name(name: str) -> list[str]:
    """Return the lines on which a table shows a name."""
    row = {"value": 0.5, "low": None, "high": None, "n": 5}
    statistics = ("hit_argmax", "mass", "neg_log_mass_mean", "set_size_mean", "fallback_frac")
    cell = dict.fromkeys(statistics, row)
    text = brief_table("", [cell], None, {"name": lambda _: name, "wide": lambda _: "w" * 41})
    body = text.split("\u2500\n", 1)[1]
    return [line[1:].split("  ")[0].rstrip() for line in body.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("previous", ["previous"]),
        ("frequency+clustered+lowrank", ["frequency+", "clustered+", "lowrank"]),
        (
            "lookup@fallback:confidence=0.5,most=3",
            ["lookup@fallback", ":confidence=0.5", ",most=3"],
        ),
        ("oracle (bound)", ["oracle (bound)"]),
        ("x" * 30, ["x" * 16, "x" * 14]),
    ],
)
def test_a_name_is_broken_between_its_parts_only(name: str, lines: list[str]) -> None:
    assert lines_of_name(name) == lines


@pytest.mark.parametrize("table", [schema.VERDICTS, schema.CANDIDATE_STATS, schema.SUMMARY])
def test_a_table_that_ends_too_early_is_damaged_input(
    results_folder: Path, tmp_path: Path, table: schema.Table
) -> None:
    folder = tmp_path / "r"
    shutil.copytree(results_folder, folder)
    path = folder / f"{table.name}.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=rf"{table.name}.parquet is damaged .*: simulate again"):
        read_results(folder)


READERS: dict[str, Callable[[Path], object]] = {
    "plain": read_results,
    "vocab": lambda folder: read_vocab(folder, "previous", None, "all"),
    "policy": lambda folder: read_policy(folder, "snapkv:kept=0.5", "all"),
    "attended": read_attended,
}
every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@every_reader
def test_results_of_another_version_are_refused_however_they_are_shown(
    results_folder: Path, tmp_path: Path, read: Callable[[Path], object]
) -> None:
    folder = tmp_path / "r"
    shutil.copytree(results_folder, folder)
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    old = json.dumps(run | {"schema_version": 0})
    (folder / "run.json").write_text(old, encoding="utf-8")
    with pytest.raises(InputError, match="holds results of version 0, this tracekit reads"):
        read(folder)


@every_reader
@pytest.mark.parametrize("text", ["{", "\udcff", "[]"])
def test_a_damaged_run_is_refused_however_it_is_shown(
    tmp_path: Path, read: Callable[[Path], object], text: str
) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"run.json is damaged|of version None"):
        read(tmp_path)


@every_reader
def test_a_folder_without_a_run_is_no_results_folder(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    with pytest.raises(InputError, match="is no results folder"):
        read(tmp_path)


def test_damaged_tables_of_attention_and_policies_are_input_errors(tmp_path: Path) -> None:
    run = json.dumps(RUN)
    (tmp_path / "run.json").write_text(run, encoding="utf-8")
    for table, name in ((schema.ATTENDED_SUMMARY, "attended"), (schema.LOGIT_STATS, "policy")):
        (tmp_path / f"{table.name}.parquet").write_bytes(b"PAR1")
        with pytest.raises(InputError, match=rf"{table.name}.parquet is damaged"):
            READERS[name](tmp_path)


def test_a_controller_without_its_fixed_set_says_what_to_run(adapted: Path) -> None:
    data, text = read_vocab(adapted, LONG, None, "all")
    assert {row["fixed"] for row in data["gains"]} == {None}
    assert {row["n_fixed"] for row in data["gains"]} == {0}
    assert {row["num_sequences_fixed"] for row in data["gains"]} == {0}
    lacking = "simulate with --vocab previous:top=7@fallback:confidence=0.03125 too."
    assert lacking in flat(text)
    assert fits(text)


def test_a_scheme_is_told_by_size_with_its_ceiling(results_folder: Path, tmp_path: Path) -> None:
    folder = with_verdicts(results_folder, tmp_path / "r", verdict())
    data, text = read_vocab(folder, "previous", None, "all")
    assert {row["size"] for row in data["statistics"]} == {16, 64, 4096}
    cost = next(
        row["value"]
        for row in data["statistics"]
        if (row["size"], row["statistic"]) == (16, "cost_frac")
    )
    line = next(one for one in text.splitlines() if one.startswith("   16 "))
    assert f"{ceiling(0.5, cost):.3g}" in line.split()
    assert "of a batch" in text
    assert fits(text)
    json.dumps(data)


def test_one_size_is_told_in_full(results_folder: Path) -> None:
    data, text = read_vocab(results_folder, "previous:top=256", 16, "all")
    for name in ("neg_log_mass_p99.9", "run_mean", "set_size_p95", "ceiling", "hit_min_p"):
        assert name in text
    assert len(data["miss_classes"])
    assert {row["size"] for row in data["misses"]} == {16}
    assert f"the surest of {data['misses'][0]['num_misses']} misses" in text
    assert "misses by class" in text
    assert fits(text)
    whole = read_vocab(results_folder, "oracle", 4096, "all")[1]
    assert "no miss" in whole


@pytest.mark.parametrize("group", ["domain", "entropy", "class", "position", "bucket"])
def test_a_grouping_is_told_group_by_group(results_folder: Path, group: str) -> None:
    data, text = read_vocab(results_folder, "frequency", 64, group)
    groups = {row["group"] for row in data["statistics"]}
    assert {row["grouping"] for row in data["statistics"]} == {group}
    assert all(f" {one} " in text for one in groups)
    assert "misses" not in data
    assert fits(text)


def test_a_single_group_is_told_like_all_steps(results_folder: Path) -> None:
    data, text = read_vocab(results_folder, "frequency", 64, "story")
    assert {row["group"] for row in data["statistics"]} == {"story"}
    assert "neg_log_mass_max" in text
    assert ", story: " in text


def test_controllers_are_told_once_a_fit(adapted: Path) -> None:
    data, text = read_vocab(adapted, "previous@rate", None, "all")
    assert {row["fit"] for row in data["statistics"]} == {"others", "own", "shuffled"}
    assert "sizes fitted on other prompts" in text
    assert "sizes fitted on the sequence itself" in text
    assert not (adapted / "kv.parquet").exists()


def test_what_results_do_not_hold_is_refused_in_one_sentence(
    results_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no candidate sets of random:seed=77"):
        read_vocab(results_folder, "random:seed=77", None, "all")
    with pytest.raises(InputError, match="no sets of 5 tokens: choose one of 16, 64, 4096"):
        read_vocab(results_folder, "previous", 5, "all")
    with pytest.raises(
        InputError, match="no group 'poem' of steps: choose a grouping, all, domain"
    ):
        read_vocab(results_folder, "previous", None, "poem")
    with pytest.raises(UsageError, match="did you mean 'previous'"):
        read_vocab(results_folder, "prevous", None, "all")
    (tmp_path / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
    with pytest.raises(InputError, match="holds no candidate sets: simulate with --vocab"):
        read_vocab(tmp_path, "previous", None, "all")


def test_results_without_candidate_sets_say_nothing_of_them(tmp_path: Path) -> None:
    assert read_verdicts(tmp_path) == ([], "")


def test_the_same_run_gives_the_same_bytes_and_times_stay_until_something_is_computed(
    trace_folder: Path, tmp_path: Path
) -> None:
    from tracekit.simulate.plan import make_plan
    from tracekit.simulate.run import simulate

    plan = make_plan(vocab=["previous", "oracle"], sizes=(8, 32))
    for name in "ab":
        simulate(trace_folder, tmp_path / name, plan)
    files = {
        one.name: [(tmp_path / name / f"{one.name}.parquet").read_bytes() for name in "ab"]
        for one in TOLD
    }
    del files["head_times"]
    assert all(one == two for one, two in files.values())
    times = tmp_path / "a" / "head_times.parquet"
    before = times.read_bytes()
    simulate(trace_folder, tmp_path / "a", plan)
    assert times.read_bytes() == before
    simulate(trace_folder, tmp_path / "a", make_plan(vocab=["oracle"], sizes=(8,)))
    assert set(pq.read_table(times)["size"].to_pylist()) == {8}
    simulate(trace_folder, tmp_path / "a", make_plan(["full"]))
    assert not any((tmp_path / "a" / f"{one.name}.parquet").exists() for one in TOLD)
