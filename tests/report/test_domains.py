from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.levels import Cell, make, same
from tracekit.report.blocks import Absent, Section, Text
from tracekit.report.options import Options
from tracekit.report.sections import domains
from tracekit.report.tables import HtmlTable
from tracekit.report.verdict.breaking import excesses, worst_domain
from tracekit.report.verdict.prompts import prompts

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.report.load import Results

TWO = ["code"] * 8 + ["story"] * 8


def _section(results: Results) -> tuple[list[str], list[HtmlTable]]:
    made = domains.section(results, Options())
    assert isinstance(made, Section)
    texts = [one.text for one in made.parts() if isinstance(one, Text)]
    return texts, [one for one in made.parts() if isinstance(one, HtmlTable)]


def test_a_domain_that_loses_more_than_chance_breaks_first(tmp_path: Path) -> None:
    cells = [
        Cell("good", 0.5, {"local": [*same(0.5, 8), *same(0.05, 8)]}),
        Cell("good", 0.8, {"local": same(0.01, 16)}),
        Cell("bound", 0.5, {"local": same(0.001, 16)}, more={"causal": False}),
    ]
    texts, tables = _section(make(tmp_path / "r", cells, num_sequences=16, domains=TWO))
    assert texts[0].startswith("code breaks first at level local: asked to keep 50\u00a0%, good ")
    assert "above that of all other prompts together (8 prompts against 8)" in texts[0]
    assert "the worst of 2 domains" in texts[0]
    assert [row[-1].text for row in tables[0].rows] == [
        "80\u00a0% with good",
        "50\u00a0% with good",
    ]


def test_domains_that_lose_alike_do_not_break_one_before_the_other(tmp_path: Path) -> None:
    cells = [Cell("good", 0.6, {"local": same(0.05, 8) * 2})]
    texts, tables = _section(make(tmp_path / "r", cells, num_sequences=16, domains=TWO))
    assert texts[0].startswith("No domain breaks first by more than chance at level local")
    assert tables[0].rows[0][-1].text == "60\u00a0% with good"


def test_a_domain_in_which_nothing_passes_is_said_so(tmp_path: Path) -> None:
    cells = [Cell("good", 0.6, {"local": [0.5] * 8 + same(0.05, 8)})]
    _, tables = _section(make(tmp_path / "r", cells, num_sequences=16, domains=TWO))
    assert tables[0].rows[0][-1].text == "no measured fraction"


def test_of_domains_that_are_all_alike_few_draws_name_one() -> None:
    named = 0
    for seed in range(60):
        names = [f"p{number}" for number in range(40)]
        losses = np.random.default_rng(seed).lognormal(0, 1, size=40)
        domains = pd.Series([f"d{number % 5}" for number in range(40)], index=names)
        found = worst_domain(pd.Series(losses, index=names), domains, seed=0)
        assert found is not None
        named += found.is_clear
    # 5 % are expected: 3 of 60; 8 or more would come once in a hundred such tests.
    assert named <= 7


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9).map(float)), min_size=4, max_size=12)
)
def test_the_excess_of_a_domain_is_that_of_loops_over_prompts(
    prompts: list[tuple[int, float]],
) -> None:
    numbers = [number for number, _ in prompts]
    there = [one for one in range(3) if 0 < numbers.count(one) < len(prompts)]
    if not there:
        return
    is_in = np.array([[number == one for number in numbers] for one in there])
    found = excesses(np.array([[loss for _, loss in prompts]]), is_in)[0]
    for one, excess in zip(there, found, strict=True):
        inside = [loss for number, loss in prompts if number == one]
        others = [loss for number, loss in prompts if number != one]
        wanted = sum(inside) / len(inside) - sum(others) / len(others)
        assert excess == pytest.approx(wanted, abs=1e-9)


def test_the_same_losses_everywhere_name_no_domain() -> None:
    names = [f"p{number}" for number in range(24)]
    domains = pd.Series([f"d{number % 3}" for number in range(24)], index=names)
    found = worst_domain(pd.Series([0.1] * 24, index=names), domains, seed=0)
    assert found is not None
    assert not found.is_clear


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
