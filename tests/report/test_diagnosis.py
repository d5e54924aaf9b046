from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from tests.report.fake import write_table
from tests.report.levels import Cell, make, same
from tracekit import schema
from tracekit.report.diagnosis import RULES, Finding, Rule, budgets, logits, losses, scores, trust
from tracekit.report.load import load_results
from tracekit.report.options import Options
from tracekit.report.sections import diagnosis
from tracekit.report.tables import HtmlTable
from tracekit.schema import ALL, ANY
from tracekit.simulate.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.report.load import Results

OPTIONS = Options()


def _find(one: Rule, results: Results) -> Finding:
    found = one.find(results, OPTIONS)
    assert found is not None
    return found


def _one(more: dict[str, Any] | None = None, **losses: list[float]) -> list[Cell]:
    return [Cell("good", 0.5, losses or {"local": same(0.05, 4)}, more=more)]


@pytest.mark.parametrize(
    ("one", "ill", "well"),
    [
        (budgets.window_too_large, {"is_clipped": True}, {"is_clipped": False}),
        (budgets.never_short, {"is_idle": True}, {"is_idle": False}),
        (budgets.heavy_state, {"state_bytes": 1e6}, {"state_bytes": 10.0}),
    ],
)
def test_budgets_that_fail_are_found(
    tmp_path: Path, one: Rule, ill: dict[str, Any], well: dict[str, Any]
) -> None:
    plain = Cell("plain", 0.4, {"local": same(0.05, 4)})
    assert _find(one, make(tmp_path / "ill", [*_one(ill), plain])).fires
    assert not _find(one, make(tmp_path / "well", [*_one(well), plain])).fires


@pytest.mark.parametrize(("padded", "fires"), [(0.95, True), (0.55, False)])
def test_padding_that_eats_the_saving_is_found(tmp_path: Path, padded: float, fires: bool) -> None:
    cell = Cell("ada", 0.5, {"local": same(0.05, 4)}, more={"padded_frac": padded})
    adaptive = Cell(**(vars(cell) | {"suffix": ",heads=adaptive"}))
    found = _find(budgets.padding, make(tmp_path / "r", [adaptive]))
    assert found.fires == fires
    assert "level local, n\u00a0=\u00a04" in found.evidence


@pytest.mark.parametrize(("peak", "fires"), [(1.0, True), (0.11, False)])
def test_error_in_few_layers_is_found(tmp_path: Path, peak: float, fires: bool) -> None:
    cells = _one() + [
        Cell(
            "good",
            0.5,
            {"local": [peak if layer == 3 else 0.1] * 4},
            more={"layer": layer},
        )
        for layer in range(10)
    ]
    found = _find(losses.few_layers, make(tmp_path / "r", cells))
    assert found.fires == fires
    assert "layers 3 of 10" in found.evidence


@pytest.mark.parametrize(("loss", "fires"), [(0.5, True), (0.06, False)])
def test_a_domain_far_above_the_others_is_found(tmp_path: Path, loss: float, fires: bool) -> None:
    cells = _one(local=same(loss, 8) + same(0.05, 8))
    domains = ["code"] * 8 + ["story"] * 8
    results = make(tmp_path / "r", cells, num_sequences=16, domains=domains)
    assert _find(losses.one_domain, results).fires == fires


@pytest.mark.parametrize(("far", "fires"), [(0.5, True), (0.1, None), (0.05, False)])
def test_loss_that_grows_with_distance_is_found(
    tmp_path: Path, far: float, fires: bool | None
) -> None:
    cells = _one(propagated=same(0.05, 4))
    policy = cells[0].rows([{"sequence_id": "p", "domain": "d"}])[0]["policy"]
    rows = [
        {"policy": policy, "grouping": "distance", "group": group, "statistic": "kl_mean"}
        | {"value": value, "low": 0.9 * value, "high": 1.1 * value, "n": 4}
        for group, value in (("65-256", far), ("1-16", 0.1), ("17-64", 0.2))
    ]
    found = _find(
        losses.grows_with_distance, make(tmp_path / "r", cells, tables={schema.LOGIT_STATS: rows})
    )
    assert found.fires == fires
    assert found.evidence.index("1-16") < found.evidence.index("65-256")


@pytest.mark.parametrize(("held", "fires"), [(0.3, True), (0.99, False)])
def test_needles_lost_under_a_passing_mean_are_found(
    tmp_path: Path, held: float, fires: bool
) -> None:
    results = make(tmp_path / "r", _one({"needle_kept": held}))
    assert _find(losses.lost_needles, results).fires == fires


@pytest.mark.parametrize("num", [1, 2])
def test_one_or_two_needles_let_nothing_be_said(tmp_path: Path, num: int) -> None:
    results = make(tmp_path / "r", _one())
    held = results.whole.assign(needle_kept=[0.1] * num + [np.nan] * (4 - num))
    rows = pd.DataFrame(summarise(held, results.table(schema.VOCAB_RESULTS), seed=0))
    write_table(results.folder, schema.SUMMARY, rows)
    write_table(results.folder, schema.KV_RESULTS, held)
    again = load_results(results.folder)
    assert again.methods("kv", "needle_kept")
    assert losses.lost_needles.find(again, OPTIONS) is None


def test_a_needle_is_held_against_the_loss_of_the_same_prompts(tmp_path: Path) -> None:
    lost = {"local": same(0.01, 8), "propagated": [*same(0.5, 3), *same(0.001, 5)]}
    results = make(tmp_path / "r", [Cell("good", 0.5, lost)], num_sequences=8)
    held = results.whole.copy()
    is_local = held["level"] == "local"
    held["needle_kept"] = np.where(
        is_local & held["sequence_id"].isin(["p0#0", "p1#0", "p2#0"]), 0.1, np.nan
    )
    write_table(results.folder, schema.KV_RESULTS, held)
    assert losses.lost_needles.find(load_results(results.folder), OPTIONS) is None
    far = ["p5#0", "p6#0", "p7#0"]
    held["needle_kept"] = np.where(is_local & held["sequence_id"].isin(far), 0.1, np.nan)
    write_table(results.folder, schema.KV_RESULTS, held)
    found = _find(losses.lost_needles, load_results(results.folder))
    assert found.fires
    assert "KL 0.001" in found.evidence
    assert "n\u00a0=\u00a03, level propagated) and holds 10\u00a0% of the needle" in found.evidence


@pytest.mark.parametrize(("noise", "fires"), [(0.1, True), (0.001, False)])
def test_a_noise_floor_above_the_effect_is_found(tmp_path: Path, noise: float, fires: bool) -> None:
    cells = _one({"noise_kl_nats": noise}, propagated=same(0.05, 4))
    assert _find(trust.under_noise, make(tmp_path / "r", cells)).fires == fires


@pytest.mark.parametrize(
    ("rank", "factor", "fires"), [(0.95, 1.4, False), (0.5, 1.4, True), (0.95, 3.0, True)]
)
def test_predictions_that_mislead_are_found(
    tmp_path: Path, rank: float, factor: float, fires: bool
) -> None:
    values = {"spearman": rank, "pairs_ordered": 0.9, "propagated_over_predicted": factor}
    rows = [
        {"statistic": name, "level": "predicted", "group": ANY, "value": value}
        | {"num_cells": 40, "num_sequences": 4}
        for name, value in values.items()
    ]
    results = make(tmp_path / "r", _one(), tables={schema.CALIBRATION: rows})
    assert _find(trust.poor_prediction, results).fires == fires


@pytest.mark.parametrize(("transform", "fires"), [(0.3, True), (0.05, False)])
def test_quantisation_that_costs_more_is_found(
    tmp_path: Path, transform: float, fires: bool
) -> None:
    row = {"policy": "a+int4", "level": "local", "measure": "output_error", "n": 4}
    row |= {"eviction_mean": 0.1, "transform_mean": transform}
    results = make(tmp_path / "r", _one(), tables={schema.STACKING: [row]})
    assert _find(trust.costly_transform, results).fires == fires


@pytest.mark.parametrize(
    ("one", "reference"),
    [(scores.recency_suffices, "streaming"), (scores.chance_suffices, "random")],
)
@pytest.mark.parametrize(
    ("loss", "fires"),
    [
        (same(0.2, 4), True),
        (same(0.095, 4), True),
        (same(0.05, 4), False),
        ([0.03, 0.15] * 2, None),
    ],
)
def test_scores_that_beat_nothing_are_found(
    tmp_path: Path, one: Rule, reference: str, loss: list[float], fires: bool | None
) -> None:
    cells = [
        Cell("h2o", 0.5, {"local": loss}),
        Cell(reference, 0.5, {"local": same(0.1, 4)}),
        Cell("larger", 0.7, {"local": same(0.001, 4)}, target=0.5),
    ]
    assert _find(one, make(tmp_path / "r", cells)).fires == fires


@pytest.mark.parametrize(("before", "fires"), [(0.5, True), (0.11, False)])
def test_a_policy_that_needs_the_question_is_found(
    tmp_path: Path, before: float, fires: bool
) -> None:
    def name(place: str) -> dict[str, Any]:
        return {"policy": f"snapkv:kept=0.5,at={place}", "evict_at": f"at={place}"}

    cells = [
        Cell("snapkv", 0.5, {"local": same(0.1, 4)}, more=name("prompt")),
        Cell("snapkv:context", 0.5, {"local": same(before, 4)}, more=name("context")),
    ]
    assert _find(scores.saw_the_question, make(tmp_path / "r", cells)).fires == fires


@pytest.mark.parametrize(("kept", "fires"), [(0.6, True), (0.95, False)])
def test_evicted_sinks_are_found(tmp_path: Path, kept: float, fires: bool) -> None:
    rows = [
        {"sequence_id": f"p{number}#0", "kv_head": ALL, "layer": layer, "first_4_mass": 0.5}
        for number in range(4)
        for layer in range(3)
    ]
    results = make(
        tmp_path / "r", _one({"mass_kept": kept}), tables={schema.ATTENTION_RESULTS: rows}
    )
    assert _find(scores.sinks_evicted, results).fires == fires


SCHEME = {"estimator": "lowrank", "controller": "fixed", "fit": "asked", "size": 1024}


@pytest.mark.parametrize(
    ("one", "table", "ill", "well"),
    [
        (
            logits.missed_class,
            schema.MISS_CLASSES,
            {"class": "cjk", "num_misses": 20, "miss_share": 0.5, "step_share": 0.1, "lift": 5.0},
            {"class": "cjk", "num_misses": 20, "miss_share": 0.5, "step_share": 0.4, "lift": 1.2},
        ),
        (
            logits.sure_misses,
            schema.MISSES,
            {"place": 1, "num_misses": 5, "best_prob": 0.99, "text": "a", "sequence_id": "p"},
            {"place": 1, "num_misses": 5, "best_prob": 0.4, "text": "a", "sequence_id": "p"},
        ),
        (
            logits.eaten_by_batch,
            schema.BATCH_UNIONS,
            {"batch": 8, "cost_frac": 0.9, "num_draws": 64, "n": 8},
            {"batch": 8, "cost_frac": 0.2, "num_draws": 64, "n": 8},
        ),
    ],
)
def test_candidate_sets_that_do_not_pay_are_found(
    tmp_path: Path, one: Rule, table: schema.Table, ill: dict[str, Any], well: dict[str, Any]
) -> None:
    for name, row in (("ill", ill), ("well", well)):
        results = make(tmp_path / name, [], vocab=True, tables={table: [SCHEME | row]})
        assert _find(one, results).fires == (name == "ill")


@pytest.mark.parametrize(
    ("own", "fires"), [([0.8] * 4, True), ([0.95] * 4, False), ([0.7, 0.95] * 2, None)]
)
def test_controllers_that_gain_nothing_over_fixed_sizes_are_found(
    tmp_path: Path, own: list[float], fires: bool | None
) -> None:
    rows = [
        {"sequence_id": f"p{number}#0", "estimator": "previous", "controller": controller}
        | {"fit": fit, "size": 1024, "hit_argmax": hit, "num_scored": 1000, "set_size_mean": size}
        for number in range(4)
        for controller, fit, hit, size in (
            ("rate:gain=4", "own", own[number], 900.0),
            ("rate:gain=4", "shuffled", 0.5, 910.0),
            ("fixed", "asked", 0.8, 1024.0),
        )
    ]
    results = make(tmp_path / "r", _one(), tables={schema.VOCAB_RESULTS: rows})
    found = _find(logits.idle_controller, results)
    assert found.fires is fires
    assert "timing alone" in found.evidence


def test_dear_estimators_are_told(tmp_path: Path) -> None:
    found = _find(logits.dear_estimator, make(tmp_path / "r", [], vocab=True))
    assert not found.fires
    assert "0 of 3 estimators" in found.evidence


def test_every_rule_is_found_quiet_or_named_as_not_checked(tmp_path: Path) -> None:
    made = diagnosis.section(make(tmp_path / "r", _one({"is_clipped": True})), OPTIONS)
    tables = {one.name: one for one in made.parts() if isinstance(one, HtmlTable)}
    symptoms = [row[0].text for one in tables.values() for row in one.rows]
    assert sorted(symptoms) == sorted(one.symptom for one in RULES)
    assert len(set(symptoms)) == len(RULES)
    assert [row[0].text for row in tables["diagnosis-found"].rows] == [
        budgets.window_too_large.symptom
    ]


def test_the_section_is_the_same_each_time(tmp_path: Path) -> None:
    results = make(tmp_path / "r", _one())
    assert diagnosis.section(results, OPTIONS) == diagnosis.section(results, OPTIONS)
