from __future__ import annotations

from typing import TYPE_CHECKING

from tests.report.levels import Cell, make, same
from tracekit.report.blocks import Absent, Section, Text
from tracekit.report.options import Options
from tracekit.report.sections import domains
from tracekit.report.tables import HtmlTable
from tracekit.report.verdict.compared import prompts

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.report.load import Results

TWO = ["code"] * 8 + ["story"] * 8


def _section(results: Results) -> tuple[list[str], list[HtmlTable]]:
    made = domains.section(results, Options())
    assert isinstance(made, Section)
    texts = [one.text for one in made.parts() if isinstance(one, Text)]
    return texts, [one for one in made.parts() if isinstance(one, HtmlTable)]


def test_the_domain_that_needs_most_breaks_first(tmp_path: Path) -> None:
    cells = [
        Cell("good", 0.3, {"local": [0.5] * 8 + same(0.05, 8)}),
        Cell("good", 0.6, {"local": same(0.05, 16)}),
    ]
    texts, tables = _section(make(tmp_path / "r", cells, num_sequences=16, domains=TWO))
    assert texts[0].startswith("code breaks first at level local: it needs 60\u00a0%")
    assert "the next domain needs 30\u00a0%" in texts[0]
    assert [row[-1].text for row in tables[0].rows] == [
        "60\u00a0% with good",
        "30\u00a0% with good",
    ]


def test_domains_that_need_alike_break_together(tmp_path: Path) -> None:
    cells = [Cell("good", 0.6, {"local": same(0.05, 16)})]
    texts, _ = _section(make(tmp_path / "r", cells, num_sequences=16, domains=TWO))
    assert texts[0].startswith("No domain breaks before the others")


def test_a_domain_in_which_nothing_passes_breaks_first(tmp_path: Path) -> None:
    cells = [Cell("good", 0.6, {"local": [0.5] * 8 + same(0.05, 8)})]
    texts, tables = _section(make(tmp_path / "r", cells, num_sequences=16, domains=TWO))
    assert "code breaks first at level local: it passes at no measured fraction" in texts[0]
    assert tables[0].rows[0][-1].text == "no measured fraction"


def test_seven_prompts_give_a_lead_and_no_verdict(tmp_path: Path) -> None:
    cells = [Cell("good", 0.5, {"local": [0.5] * 7 + same(0.05, 7)})]
    results = make(tmp_path / "r", cells, num_sequences=14, domains=TWO[1:])
    texts, tables = _section(results)
    assert texts[0].startswith("No verdict by domain at level local: 2 of 2 domains")
    assert "A lead, no verdict: good at 50\u00a0% asked loses most in code" in texts[0]
    assert {row[-1].text for row in tables[0].rows} == {"no verdict"}


def test_samples_of_one_prompt_count_once(tmp_path: Path) -> None:
    names = [f"p{number // 2}#{number % 2}" for number in range(8)]
    cells = [Cell("good", 0.5, {"local": same(0.05, 8)})]
    results = make(tmp_path / "r", cells, num_sequences=8, names=names, domains=["story"] * 8)
    assert prompts(results, "local") == {"story": 4}


def test_each_level_has_its_table_and_policies_are_at_most_six(tmp_path: Path) -> None:
    cells = [
        Cell(f"p{number}", 0.5, {"local": same(0.01 * (9 - number), 4), "propagated": [0.1] * 3})
        for number in range(9)
    ]
    _, tables = _section(make(tmp_path / "r", cells))
    assert [one.name for one in tables] == ["domains-propagated", "domains-local"]
    labels = [one.label for one in tables[1].columns]
    assert labels == ["domain", "prompts", "p8", "p7", "p6", "p5", "p4", "p3", "needs"]
    assert tables[1].caption.endswith("Bounds are left out, and 3 more policies.")
    assert all(cell.text.endswith(("n=1", "n=2")) for row in tables[0].rows for cell in row[2:-1])


def test_without_eviction_there_is_nothing_by_domain(tmp_path: Path) -> None:
    made = domains.section(make(tmp_path / "r", [], vocab=True), Options())
    assert isinstance(made, Absent)
