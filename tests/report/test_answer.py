from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.fake import make_results
from tracekit.report.answer import ERROR_BOUND, _smallest, kv_answer, vocab_answer
from tracekit.report.load import Point, load_results

if TYPE_CHECKING:
    from pathlib import Path


def _point(x: float, mean: float) -> Point:
    return Point("p", "p", "local", x, x, mean, math.nan, math.nan, 1, 0)


def _slow_smallest(curve: list[Point], bound: float) -> Point | None:
    """Return the smallest x such that it and all points of larger x pass: the rule as written."""
    good = [p for p in curve if all(q.mean < bound for q in curve if q.x >= p.x)]
    return min(good, key=lambda p: p.x) if good else None


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0, 1))
def test_the_smallest_passing_point_is_that_of_the_rule(means: list[float], bound: float) -> None:
    curve = [_point(float(x), mean) for x, mean in enumerate(means)]
    assert _smallest(curve, lambda p: p.mean < bound) == _slow_smallest(curve, bound)


def test_the_kv_answer_has_numbers_an_interval_and_n(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=16))
    answer = kv_answer(results)
    best = _slow_smallest(results.curves("kv", "output_error")["snapkv"], ERROR_BOUND)
    assert best is not None
    assert answer.verdict.startswith("snapkv needs the least: with ")
    assert f"{100 * best.x:.0f}\u00a0% of the cache" in answer.verdict
    assert "n\u00a0=\u00a016" in answer.verdict
    assert {name for name, _ in answer.findings} == {
        "h2o",
        "knorm",
        "random",
        "snapkv",
        "streaming",
    }
    assert "level local" in answer.rule
    assert "not perplexity" in answer.cautions[0]


def test_two_sequences_give_no_interval(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=2))
    for answer in (kv_answer(results), vocab_answer(results)):
        assert all("no interval below 3 sequences" in finding for _, finding in answer.findings)


def test_small_domains_get_no_verdict(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=20))
    assert kv_answer(results).cautions[1:] == (
        "No verdict for 7 of 7 domains: fewer than 8 sequences each.",
    )


def test_large_domains_get_one(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=50))
    sentences = kv_answer(results).cautions[1:]
    assert sum(sentence.startswith("Domain ") for sentence in sentences) == 1
    assert sentences[-1] == "No verdict for 6 of 7 domains: fewer than 8 sequences each."


def test_an_oracle_is_never_the_verdict(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=8))
    answer = vocab_answer(results)
    assert answer.verdict.startswith("lowrank reads the least")
    assert "oracle" not in dict(answer.findings)


@pytest.mark.parametrize("question", ["kv", "vocab"])
def test_where_nothing_passes_the_verdict_says_so(tmp_path: Path, question: str) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=4))
    hard = results.summary["measure"].isin(["output_error", "hit_argmax"])
    results.summary.loc[hard, ["mean", "low", "high"]] = 0.5
    answer = {"kv": kv_answer, "vocab": vocab_answer}[question](results)
    assert answer.verdict.startswith("No ")
    assert all("no measured" in finding for _, finding in answer.findings)
