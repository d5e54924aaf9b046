"""Sweeps over layers given as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracekit.errors import UsageError
from tracekit.kv.parse import parse
from tracekit.live.layer_rule import parse_rule
from tracekit.simulate.layer_plan import RULES, make_sweep
from tracekit.simulate.plan import make_plan


def texts(*rules: str, kept: tuple[float | str, ...] = ()) -> list[str]:
    return [rule.text for rule in make_sweep(rules, kept=kept).rules]


def test_no_rule_gives_the_usual_ones_whatever_amounts_are_given() -> None:
    assert texts(kept=(0.1, 0.2)) == [parse_rule(text).text for text in RULES]


def test_a_policy_that_names_its_amount_is_one_rule() -> None:
    assert texts("snapkv:kept=0.3", kept=(0.1, 0.2)) == [parse("snapkv:kept=0.3").text]


def test_a_policy_that_names_none_is_a_rule_an_amount() -> None:
    assert texts("knorm", "rows:0.1", kept=(0.1, "64tok")) == [
        parse("knorm:kept=0.1").text,
        parse("knorm:kept=64tok").text,
        parse_rule("rows:0.1").text,
    ]


def test_a_rule_that_is_named_twice_is_run_once() -> None:
    assert texts("rows:0.1", "rows:0.10", "rows:0.1,at=prompt") == [parse_rule("rows:0.1").text]
    assert texts("knorm:kept=0.5", "knorm", kept=(0.5, 0.25)) == [
        parse("knorm:kept=0.5").text,
        parse("knorm:kept=0.25").text,
    ]


def test_what_is_asked_for_beside_the_rules_is_handed_on() -> None:
    file = Path("budget.json")
    sweep = make_sweep(["knorm"], kept=(0.2, 0.4), heads=True, fit_to=file, fit_kept=0.5)
    assert (sweep.heads, sweep.fit_to, sweep.fit_kept) == (True, file, 0.5)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ((), (0.2, 0.4)),
        (("rows:0.1", "rows:0.2"), (0.2, 0.4)),
        (("knorm:kept=0.3",), (0.2, 0.4)),
        (("knorm", "rows:0.2"), (0.2,)),
        (("knorm:kept=0.2", "snapkv:kept=0.4"), (0.2, 0.4)),
        (("knorm", "snapkv"), (0.2, 0.4)),
    ],
)
def test_a_budget_needs_one_policy_at_several_amounts(
    rules: tuple[str, ...], kept: tuple[float, ...]
) -> None:
    with pytest.raises(UsageError, match="--rule snapkv"):
        make_sweep(rules, kept=kept, fit_to=Path("b.json"))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("rows:0", r"\(0, 1\]"),
        ("rows:2", r"\(0, 1\]"),
        ("rows:many", "drops no entries of rows"),
        ("rows:", "drops no entries of rows"),
        ("rows:0.1,every=3", "drops no entries of rows"),
        ("h20", "did you mean 'h2o'"),
        ("h2o:kept=0", "kept"),
        ("", "policy"),
    ],
)
def test_a_rule_that_does_not_exist_is_refused(rule: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_sweep([rule], kept=(0.3,))


def test_a_policy_beside_the_one_at_several_amounts_does_not_hinder_the_budget() -> None:
    rules = ["knorm", "snapkv:kept=0.3", "rows:0.1"]
    assert make_sweep(rules, kept=(0.2, 0.4), fit_to=Path("b.json")).fit_to is not None


def test_an_amount_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="lots"):
        make_sweep(["h2o"], kept=("lots",))


def test_a_sweep_alone_is_all_that_runs() -> None:
    plan = make_plan(sweep=make_sweep(["rows:0.1"]))
    assert not plan.families
    assert not plan.schemes
    assert not plan.attention
    assert plan.to_json()["rules"] == ["rows:0.1,at=prompt"]
