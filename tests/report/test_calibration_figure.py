from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.report.fake import KEPT, POLICIES, make_results, write_table
from tracekit.report.blocks import Section, Text
from tracekit.report.figures.calibration import MOST_NAMED, NAME, calibration_scatter
from tracekit.report.figures.canvas import styles
from tracekit.report.figures.figure import Figure
from tracekit.report.formats import number, percent
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections import curves
from tracekit.schema import ALL, CALIBRATION, KV_RESULTS, SUMMARY, VOCAB_RESULTS
from tracekit.simulate.calibration import calibration
from tracekit.simulate.calibration_cells import calibration_cells
from tracekit.simulate.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("int4", "quest", "r_kv", "tova")
LOOKS = styles([*POLICIES, *FAMILIES])


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
    loaded = load_results(folder)
    summary = summarise(loaded.whole, loaded.table(VOCAB_RESULTS), seed=0)
    pq.write_table(SUMMARY.build(len(summary["mean"]), summary), folder / "summary.parquet")
    pq.write_table(
        CALIBRATION.build(len(columns["value"]), columns), folder / "calibration.parquet"
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_results(
        tmp_path_factory.mktemp("calibrated") / "results", num_sequences=6, questions=("kv",)
    )
    return add_levels(made)


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return load_results(folder)


def statistics(results: Results) -> pd.DataFrame:
    rows = results.table(CALIBRATION)
    return rows[rows["level"] == "predicted"].set_index(["statistic", "group"])


def changed(results: Results, whole: pd.DataFrame) -> Results:
    """Return results with other rows of cells."""
    new = Results(
        folder=results.folder, run=results.run, spec=results.spec, _frames=dict(results._frames)
    )
    vars(new)["whole"] = whole
    return new


def without_statistics(results: Results) -> Results:
    new = changed(results, results.whole)
    new._frames[CALIBRATION.name] = results.table(CALIBRATION).iloc[:0]
    return new


def test_the_picture_holds_the_cells_that_have_all_three_levels(results: Results) -> None:
    figure = calibration_scatter(results, LOOKS)
    assert figure is not None
    assert len(figure.table) == 4 * len(KEPT) * (len(POLICIES) + len(FAMILIES))
    assert figure.table["sequence_id"].nunique() == 4
    assert figure.table[["kl_predicted_nats", "kl_nats"]].notna().all().all()
    assert f"{len(figure.table)} cells of 4 sequences" in figure.alt


def test_the_words_are_the_numbers_of_the_calibration(results: Results) -> None:
    figure = calibration_scatter(results, LOOKS)
    assert figure is not None
    value = statistics(results)["value"]
    assert f"Spearman {value['spearman', 'all']:.3g}" in figure.alt
    assert f"predicted^{value['power_law_b', 'all']:.3g}" in figure.caption
    assert f"{value['propagated_over_predicted', 'all']:.3g} times predicted" in figure.alt


def test_few_families_are_named_and_both_axes_name_their_level(results: Results) -> None:
    figure = calibration_scatter(results, LOOKS)
    assert figure is not None
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)
    families = set(figure.table["family"])
    assert len(families) > MOST_NAMED == len(families & set(texts))
    assert {"equal", "power law"} <= set(texts)
    assert {f"KL in nats a token, level {one}" for one in ("predicted", "propagated")} <= set(texts)
    assert f"families nearer the diagonal ({len(families) - MOST_NAMED})" in figure.caption


def test_bounds_and_cells_at_the_noise_floor_are_no_marks(results: Results) -> None:
    whole = results.whole.copy()
    cells = whole.loc[whole["level"] == "propagated"].index[:3]
    whole.loc[cells[0], "causal"] = False
    whole.loc[cells[1], "is_idle"] = True
    whole.loc[cells[2], "noise_kl_nats"] = 1e6
    figure = calibration_scatter(changed(results, whole), LOOKS)
    assert figure is not None
    assert len(figure.table) == len(calibration_cells(results.whole)) - 3
    assert "1 of bounds, 1 that change nothing, 1 at the noise floor" in figure.caption


def test_without_a_law_or_statistics_the_marks_are_drawn_all_the_same(results: Results) -> None:
    bare = without_statistics(results)
    figure = calibration_scatter(bare, LOOKS)
    assert figure is not None
    assert "power law" not in figure.svg + figure.caption
    one = results.whole["sequence_id"] == results.whole["sequence_id"].iloc[0]
    h2o = results.whole["policy"] == "h2o:kept=0.5"
    vars(bare)["whole"] = results.whole[one & h2o]
    figure = calibration_scatter(bare, LOOKS)
    assert figure is not None
    assert len(figure.table) == 1


def test_results_of_one_level_have_no_such_picture(tmp_path: Path) -> None:
    alone = load_results(make_results(tmp_path / "r", num_sequences=3, questions=("kv",)))
    assert calibration_scatter(alone, LOOKS) is None


def test_the_section_says_how_far_a_prediction_can_be_trusted(results: Results) -> None:
    section = curves.section(results, Options())
    assert isinstance(section, Section)
    parts = list(section.parts())
    assert NAME in [part.name for part in parts if isinstance(part, Figure)]
    (told,) = (
        p.text for p in parts if isinstance(p, Text) and "puts the better one first" in p.text
    )
    value = statistics(results)["value"]
    assert percent(value["pairs_ordered", "all"]) in told
    assert f"{number(value['propagated_over_predicted', 'all'])} times the predicted" in told
    assert f"a factor below {number(value['left_out_factor', 'as predicted'])}" in told


def test_without_statistics_the_section_says_that_there_are_too_few_cells(results: Results) -> None:
    section = curves.section(without_statistics(results), Options())
    assert isinstance(section, Section)
    assert any("Too few cells" in p.text for p in section.parts() if isinstance(p, Text))
