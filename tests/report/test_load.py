from __future__ import annotations

import json
import math
from copy import deepcopy
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.report.fake import DOMAINS, KEPT, POLICIES, make_results, write_table
from tracekit.errors import InputError
from tracekit.report.load import load_results
from tracekit.schema import SUMMARY, VOCAB_RESULTS
from tracekit.simulate.folder import read_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_results(tmp_path / "results", num_sequences=7)


def test_curves_are_sorted_and_hold_one_level(folder: Path) -> None:
    curves = load_results(folder).curves("kv", "output_error")
    assert list(curves) == sorted(POLICIES)
    for family, curve in curves.items():
        assert [point.asked for point in curve] == list(KEPT)
        assert [point.x for point in curve] == sorted(point.x for point in curve)
        assert {point.family for point in curve} == {family}
        assert {point.level for point in curve} == {"local"}


def test_points_of_other_levels_are_never_mixed_in(folder: Path) -> None:
    summary = pq.read_table(folder / "summary.parquet").to_pandas()
    other = summary[summary["question"] == "kv"].assign(level="propagated")
    before = load_results(folder).curves("kv", "output_error")
    write_table(folder, SUMMARY, pd.concat([summary, other]))
    assert load_results(folder).curves("kv", "output_error") == before


def test_the_full_cache_is_no_curve(folder: Path) -> None:
    summary = pq.read_table(folder / "summary.parquet").to_pandas()
    like = (summary["question"] == "kv") & (summary["family"] == "h2o")
    full = summary[like].assign(family="full", name="full", x=1.0)
    write_table(folder, SUMMARY, pd.concat([summary, full]))
    assert list(load_results(folder).curves("kv", "output_error")) == sorted(POLICIES)


def test_a_domain_has_its_own_points_and_few_sequences_no_interval(folder: Path) -> None:
    results = load_results(folder)
    assert results.domains("kv") == sorted(DOMAINS)
    points = [
        p for curve in results.curves("kv", "mass_kept", domain="code").values() for p in curve
    ]
    assert {point.n for point in points} == {1}
    assert all(math.isnan(point.low) and math.isnan(point.high) for point in points)


def test_the_means_of_a_measure_are_found_by_cell(folder: Path) -> None:
    results = load_results(folder)
    means = results.means("vocab", "cost_frac")
    for curve in results.curves("vocab", "hit_argmax").values():
        costs = [means[point.cell] for point in curve]
        assert costs == sorted(costs)


def test_an_absent_table_is_empty_and_its_question_has_no_points(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=3, questions=("kv",)))
    assert results.families("kv")
    assert not results.families("vocab")
    assert results.table(VOCAB_RESULTS).empty
    assert "hit_argmax" in results.table(VOCAB_RESULTS)


TRACE = dict.fromkeys(("path", "run_id", "created", "host", "capture", "sampler")) | {"spec": {}}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"schema_version": 99}, "results of version 99"),
        ({"schema_version": None}, "results of version None"),
        ({"trace": TRACE}, "no valid model spec"),
        ({"trace": TRACE | {"spec": None}}, "no valid model spec"),
        ({"trace": {}}, r"lacks trace\.path, trace\.run_id"),
        ({"trace": None}, r"lacks trace\.path"),
        ({"plan": []}, r"lacks plan\.kv, plan\.vocab, plan\.sizes, plan\.levels, plan\.kv_bytes"),
        ({"sequences": {}}, "lacks sequences;"),
        ({"sequences": [None]}, r"lacks sequences\[0\]\.sequence_id, .*tokens_sha256;"),
        ({"failed": None}, "lacks failed;"),
        ({"failed": [{"cell": "x", "why": ""}, {"cell": "x"}]}, r"lacks failed\[1\]\.why;"),
        ({"skipped": ["h2o"]}, r"lacks skipped\[0\]\.what, skipped\[0\]\.sequence_id"),
    ],
)
def test_a_foreign_run_is_refused_in_one_sentence(
    tmp_path: Path, run: dict[str, Any], message: str
) -> None:
    folder = make_results(tmp_path / "r", num_sequences=3, questions=("kv",), run=run)
    with pytest.raises(InputError, match=message) as caught:
        load_results(folder)
    assert caught.value.exit_code == 3


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results folder"):
        load_results(tmp_path)
    with pytest.raises(InputError, match="no results folder"):
        load_results(tmp_path / "missing")


@pytest.mark.parametrize("text", ["{", "[]", "7", ""])
def test_a_damaged_run_file_is_refused(folder: Path, text: str) -> None:
    (folder / "run.json").write_text(text)
    with pytest.raises(InputError, match="damaged"):
        load_results(folder)


def test_a_run_without_its_plan_is_refused_by_name(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_text())
    del run["plan"]
    (folder / "run.json").write_text(json.dumps(run))
    with pytest.raises(InputError, match="lacks plan"):
        load_results(folder)


@pytest.mark.parametrize("place", [("trace",), ("plan",), ("sequences", 1)])
def test_every_key_of_a_run_is_missed_by_its_name(folder: Path, place: tuple[Any, ...]) -> None:
    whole = json.loads((folder / "run.json").read_text())
    name = "sequences[1]" if len(place) > 1 else place[0]
    keys = reduce(getitem, place, whole)
    if place == ("plan",):
        keys = keys.keys() - {"kept"}  # That of these made-up results alone.
    for key in sorted(keys):
        run = deepcopy(whole)
        del reduce(getitem, place, run)[key]
        (folder / "run.json").write_text(json.dumps(run))
        with pytest.raises(InputError) as found:
            read_run(folder)
        assert str(found.value) == f"{folder / 'run.json'} lacks {name}.{key}; simulate again."


def test_results_of_failed_cells_only_are_refused(tmp_path: Path) -> None:
    run = {"failed": [{"cell": "h2o", "why": "out of memory"}]}
    folder = make_results(tmp_path / "r", num_sequences=3, questions=(), run=run)
    with pytest.raises(InputError, match=r"no finished result \(1 failed"):
        load_results(folder)


def test_a_damaged_table_is_named(folder: Path) -> None:
    (folder / "kv.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(InputError, match=r"kv\.parquet is damaged"):
        _ = load_results(folder).kv


def test_a_table_that_lacks_columns_is_named(folder: Path) -> None:
    table = pq.read_table(folder / "vocab.parquet").drop_columns(["mass"])
    pq.write_table(table, folder / "vocab.parquet")
    with pytest.raises(InputError, match=r"vocab\.parquet lacks the columns mass"):
        load_results(folder).table(VOCAB_RESULTS)


@pytest.mark.parametrize("run", [{"finished": False}, {"finished": True}, {}])
def test_an_unfinished_folder_is_refused_and_an_older_one_is_read(
    tmp_path: Path, run: dict[str, Any]
) -> None:
    folder = make_results(tmp_path / "r", num_sequences=3, questions=("kv",), run=run)
    if run.get("finished", True):
        assert load_results(folder).families("kv")
        return
    with pytest.raises(InputError, match="is unfinished") as caught:
        load_results(folder)
    assert caught.value.exit_code == 3
