from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.report.levels import Cell, make, same
from tracekit import schema
from tracekit.report.blocks import Absent, Section
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections import policies
from tracekit.report.tables import HtmlTable

if TYPE_CHECKING:
    from pathlib import Path


def _tables(results: Results) -> dict[str, HtmlTable]:
    made = policies.section(results, Options())
    assert isinstance(made, Section)
    return {one.name: one for one in made.parts() if isinstance(one, HtmlTable)}


def _n(n: int) -> str:
    return f"n\u00a0=\u00a0{n}"


def _row(table: HtmlTable, name: str) -> dict[str, str]:
    labels = [one.label for one in table.columns]
    row = next(row for row in table.rows if row[0].text == name)
    return dict(zip(labels, (cell.text for cell in row), strict=True))


def test_levels_stand_in_columns_of_their_own_with_interval_and_n(tmp_path: Path) -> None:
    losses = {"local": same(0.1, 8), "predicted": same(0.02, 4), "propagated": [0.03, 0.04]}
    noise = {"noise_kl_nats": 1e-9, "same_top_frac": 0.9}
    results = make(tmp_path / "r", [Cell("good", 0.5, losses, more=noise)])
    row = _row(_tables(results)["policies-50"], "good")
    assert row[f"output error (%), local, {_n(8)}"] == "10 [10,\u00a010]"
    assert row[f"KL (nats), predicted, {_n(4)}"].startswith("0.02")
    assert row[f"KL (nats), propagated, {_n(2)}"] == "0.035"
    assert row[f"same top token (%), propagated, {_n(2)}"] == "90"


def test_n_stands_in_each_cell_where_policies_differ_in_it(tmp_path: Path) -> None:
    cells = [Cell(name, 0.5, {"local": same(0.1, n)}) for name, n in (("a", 4), ("b", 8))]
    table = _tables(make(tmp_path / "r", cells))["policies-50"]
    assert _row(table, "a")["output error (%), local"].endswith("n=4")
    assert _row(table, "b")["output error (%), local"].endswith("n=8")


def test_what_all_policies_saw_of_the_question_stands_in_the_caption(tmp_path: Path) -> None:
    losses = {"local": same(0.1, 4)}
    blind = Cell("blind", 0.5, losses, more={"query_aware": False})
    table = _tables(make(tmp_path / "one", [Cell("a", 0.5, losses), Cell("b", 0.5, losses)]))
    assert table["policies-50"].caption.endswith("All of them saw the question")
    assert _row(table["policies-50"], "a")["schedule"] == "at=prompt"
    table = _tables(make(tmp_path / "two", [Cell("a", 0.5, losses), blind]))
    assert _row(table["policies-50"], "a")["schedule"] == "at=prompt; saw the question"
    assert _row(table["policies-50"], "blind")["schedule"] == "at=prompt; question unseen"


def test_a_level_without_results_has_no_column(tmp_path: Path) -> None:
    results = make(tmp_path / "r", [Cell("good", 0.5, {"local": same(0.1, 4)})])
    labels = [one.label for one in _tables(results)["policies-50"].columns]
    assert not any("propagated" in label or "predicted" in label for label in labels)


def test_each_policy_stands_once_a_fraction_where_it_was_asked(tmp_path: Path) -> None:
    cells = [
        Cell("good", kept, {"local": same(0.1, 4)}, target=target)
        for target, kept in ((0.1, 0.3), (0.3, 0.4), (0.5, 0.6), (0.75, 0.8))
    ]
    tables = _tables(make(tmp_path / "r", cells))
    assert list(tables) == ["policies-10", "policies-25", "policies-50"]
    assert all(len(one.rows) == 1 for one in tables.values())
    assert _row(tables["policies-25"], "good")["flags"] == "asked 30\u00a0%"
    assert _row(tables["policies-50"], "good")["kept, local"] == "60\u00a0%"


def test_flags_name_clipped_idle_and_bounds(tmp_path: Path) -> None:
    cells = [
        Cell("tight", 0.5, {"local": same(0.1, 4)}, more={"is_clipped": True}),
        Cell("bound", 0.5, {"local": same(0.1, 4)}, more={"causal": False}),
    ]
    table = _tables(make(tmp_path / "r", cells))["policies-50"]
    assert _row(table, "tight")["flags"] == "clipped 4 of 4"
    assert _row(table, "bound")["flags"] == "bound"


def test_noise_marks_what_rounding_explains(tmp_path: Path) -> None:
    cells = [
        Cell(name, 0.5, {"propagated": same(0.01, 4)}, more={"noise_kl_nats": noise})
        for name, noise in (("loud", 0.02), ("clear", 0.001))
    ]
    table = _tables(make(tmp_path / "r", cells))["policies-50"]
    label = f"KL (nats), propagated, {_n(4)}"
    assert "noise" in _row(table, "loud")[label]
    assert "noise" not in _row(table, "clear")[label]


def test_perplexity_is_told_of_given_text_only(tmp_path: Path) -> None:
    more = {"nll_full": 1.0, "nll_pruned": 1.1}
    cells = [Cell("good", 0.5, {"propagated": same(0.01, 4)}, more=more)]
    results = make(tmp_path / "r", cells, num_sequences=4)
    assert not any("perplexity" in c.label for c in _tables(results)["policies-50"].columns)
    run = json.loads((tmp_path / "r/run.json").read_text())
    for number, one in enumerate(run["sequences"]):
        one |= {"sequence_id": f"p{number}#0", "text_source": "given"}
    (tmp_path / "r/run.json").write_text(json.dumps(run))
    table = _tables(load_results(tmp_path / "r"))["policies-50"]
    label = f"perplexity change (%), propagated, {_n(4)}"
    assert _row(table, "good")[label] == "+11 [+11,\u00a0+11]"


def test_kept_fractions_of_levels_that_differ_are_both_written(tmp_path: Path) -> None:
    cells = [
        Cell("good", 0.5, {"local": same(0.1, 4)}),
        Cell("good", 0.6, {"propagated": same(0.1, 4)}, target=0.5),
    ]
    row = _row(_tables(make(tmp_path / "r", cells))["policies-50"], "good")
    assert row["kept, local | propagated"] == "50\u00a0% | 60\u00a0%"


def test_stacking_has_the_interaction_and_the_rule(tmp_path: Path) -> None:
    shared = {"level": "local", "measure": "output_error_sq", "n": 4, "kept_frac": 0.2}
    shared |= {"eviction_mean": 0.1, "together_mean": 0.4, "interaction": 0.1}
    shared |= {"low": 0.05, "high": 0.2, "error_bound": 0.1, "perplexity_bound": 2.0}
    rows = [
        shared | {"policy": name, "transform_mean": 0.2, "exceeds_error_bound": exceeds}
        for name, exceeds in (("a+int2", True), ("a+int8", False), ("a+int4", None))
    ]
    cells = [Cell("a", 0.5, {"local": same(0.1, 4)})]
    table = _tables(make(tmp_path / "r", cells, tables={schema.STACKING: rows}))
    stacked = table["policies-stacking"]
    assert _row(stacked, "a+int2")["stack?"].startswith("no")
    assert _row(stacked, "a+int8")["stack?"].startswith("yes")
    assert _row(stacked, "a+int4")["stack?"] == "cannot be told"
    assert _row(stacked, "a+int8")["interaction"] == "0.1 [0.05,\u00a00.2] n=4"


def test_without_policies_the_section_says_what_to_run(tmp_path: Path) -> None:
    made = policies.section(make(tmp_path / "r", [], vocab=True), Options())
    assert isinstance(made, Absent)
    assert made.command.startswith("tracekit simulate")
