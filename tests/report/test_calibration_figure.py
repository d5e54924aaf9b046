"""The picture of propagated against predicted KL, and reports of results of several levels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.report.fake import KEPT, POLICIES, make_results, write_table
from tests.report.page import Page
from tracekit.report import write_report
from tracekit.report.figures.calibration import MOST_NAMED, NAME, calibration_scatter
from tracekit.report.load import Results, load_results
from tracekit.schema import ALL, CALIBRATION, KV_RESULTS, SUMMARY
from tracekit.simulate.calibration import calibration

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("int4", "quest", "r_kv", "tova")
PLAN: dict[str, Any] = {
    "kv": [],
    "vocab": [],
    "sizes": [],
    "levels": ["propagated"],
    "kv_bytes": 2,
}


def add_levels(folder: Path, num_sequences: int = 4, *, seed: int = 0) -> Path:
    """Give a results folder predicted and propagated rows of some sequences, and a calibration."""
    rng = np.random.default_rng(seed)
    kv = pq.read_table(folder / "kv.parquet").to_pandas().astype({"family": str, "policy": str})
    whole = kv[(kv["layer"] == ALL) & (kv["kv_head"] == ALL)]
    whole = whole[whole["sequence_id"].isin(whole["sequence_id"].unique()[:num_sequences])]
    more = [
        whole[whole["family"] == "h2o"].assign(family=one, policy=f"{one}:" + whole["policy"])
        for one in FAMILIES
    ]
    local = pd.concat([whole, *more]).assign(is_idle=False)
    propagated = 0.8 * local["output_error"] ** 2 * np.exp(0.3 * rng.normal(size=len(local)))
    predicted = (propagated / 1.3) ** 0.9 * np.exp(0.3 * rng.normal(size=len(local)))
    nothing = {"output_error": None, "output_cosine": None, "mass_kept": None}
    told = local.assign(level="predicted", kl_predicted_nats=predicted, **nothing)
    run = local.assign(level="propagated", kl_nats=propagated, noise_kl_nats=1e-6, **nothing)
    frame = pd.concat([kv, *more, told, run]).astype({"level": object, "steps": object})
    write_table(folder, KV_RESULTS, frame)
    columns = calibration(frame, seed=1).columns
    pq.write_table(
        CALIBRATION.build(len(columns["value"]), columns), folder / "calibration.parquet"
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_results(tmp_path_factory.mktemp("calibrated") / "results", num_sequences=6)
    return add_levels(made)


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return load_results(folder)


def test_the_picture_holds_the_cells_that_have_all_three_levels(results: Results) -> None:
    figure = calibration_scatter(results)
    assert figure is not None
    assert len(figure.table) == 4 * len(KEPT) * (len(POLICIES) + len(FAMILIES))
    assert figure.table["sequence_id"].nunique() == 4
    assert figure.table[["kl_predicted_nats", "kl_nats"]].notna().all().all()
    assert f"{len(figure.table)} cells of 4 sequences" in figure.alt


def test_the_words_are_the_numbers_of_the_calibration(results: Results) -> None:
    figure = calibration_scatter(results)
    assert figure is not None
    rows = results.calibration[results.calibration["level"] == "predicted"]
    value = rows.set_index(["statistic", "group"])["value"]
    assert f"Spearman {value['spearman', 'all']:.3g}" in figure.alt
    assert f"predicted^{value['power_law_b', 'all']:.3g}" in figure.caption
    assert f"{value['propagated_over_predicted', 'all']:.3g} times predicted" in figure.alt


def test_few_families_are_named_and_both_axes_name_their_level(results: Results) -> None:
    figure = calibration_scatter(results)
    assert figure is not None
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)
    families = set(figure.table["family"])
    assert len(families) > MOST_NAMED == len(families & set(texts))
    assert {"equal", "power law"} <= set(texts)
    assert {f"KL in nats a token, level {one}" for one in ("predicted", "propagated")} <= set(texts)
    assert f"families nearer the diagonal ({len(families) - MOST_NAMED})" in figure.caption


def test_bounds_and_cells_at_the_noise_floor_are_no_marks(results: Results) -> None:
    cells = results.cells.copy()
    cells.loc[0, "is_bound"] = True
    cells.loc[1, "is_idle"] = True
    cells.loc[2, "has_log"] = False
    figure = calibration_scatter(Results(**{**vars(results), "cells": cells}))
    assert figure is not None
    assert len(figure.table) == len(cells) - 3
    assert "1 of bounds, 1 that change nothing, 1 at the noise floor" in figure.caption


def test_without_a_law_or_statistics_the_marks_are_drawn_all_the_same(results: Results) -> None:
    bare = Results(**{**vars(results), "calibration": results.calibration.iloc[:0]})
    figure = calibration_scatter(bare)
    assert figure is not None
    assert "power law" not in figure.svg + figure.caption
    one = Results(**{**vars(bare), "cells": results.cells.iloc[:1]})
    figure = calibration_scatter(one)
    assert figure is not None
    assert len(figure.table) == 1


def test_results_of_one_level_have_no_such_picture(tmp_path: Path) -> None:
    results = make_results(tmp_path / "r", num_sequences=3)
    assert calibration_scatter(load_results(results)) is None
    page = Page(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert f"figure-{NAME}" not in [figure["id"] for figure in page.all("figure")]


def test_a_report_of_three_levels_shows_local_curves_and_the_calibration(
    folder: Path, tmp_path: Path
) -> None:
    text = write_report(folder, tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    names = [figure["id"] for figure in page.all("figure")]
    assert {f"figure-{NAME}", "figure-error-by-kept-fraction"} <= set(names)
    assert (tmp_path / "r-files" / f"{NAME}.svg").exists()
    assert len((tmp_path / "r-files" / f"{NAME}.csv").read_text().splitlines()) > 100
    assert "How far a prediction can be trusted" in page.text("h3")


def test_curves_are_local_and_do_not_change_with_the_levels_beside_them(
    folder: Path, results: Results, tmp_path: Path
) -> None:
    alone = load_results(make_results(tmp_path / "r", num_sequences=6))
    assert results.level == alone.level == "local"
    assert results.curves("kv", "output_error") == alone.curves("kv", "output_error")
    assert set(results.kv["level"]) == {"local"}


def test_results_without_a_local_level_say_what_to_run(folder: Path, tmp_path: Path) -> None:
    kv = pq.read_table(folder / "kv.parquet").to_pandas()
    bare = make_results(tmp_path / "r", num_sequences=6, run={"plan": PLAN})
    (bare / "vocab.parquet").unlink()
    write_table(bare, KV_RESULTS, kv[kv["level"].astype(str) == "propagated"])
    summary = pq.read_table(bare / "summary.parquet").to_pandas()
    held = summary[summary["measure"] == "kept_frac"]
    write_table(bare, SUMMARY, held.assign(level="propagated"))
    assert load_results(bare).level == "propagated"
    page = Page(write_report(bare, tmp_path / "r.html").read_text(encoding="utf-8"))
    commands = [text for text in page.text("code") if text.startswith("tracekit simulate TRACE")]
    assert "tracekit simulate TRACE -o RESULTS --level local,propagated" in commands
    assert not [figure for figure in page.all("figure") if "error" in figure["id"]]
