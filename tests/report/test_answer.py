from __future__ import annotations

import math
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.fake import make_results
from tests.report.levels import Cell, make, same
from tracekit import schema
from tracekit.report.answers import kv_answer, layer_answer, vocab_answer
from tracekit.report.blocks import Details, Framed, Items, Text
from tracekit.report.claims.logits import attention_foretells
from tracekit.report.load import Point, Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections import answer
from tracekit.report.tables import HtmlTable
from tracekit.report.verdict.ranking import rank, ranking, smallest
from tracekit.report.verdict.yardstick import Yardstick, judging, yardsticks
from tracekit.schema import ALL, ANY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tracekit.report.answers import Answer

OPTIONS = Options()
KL = Yardstick("propagated", 0.1)
ONE = Cell("good", 0.5, {"local": same(0.05, 4)})


def _point(x: float, high: float, family: str = "p") -> Point:
    return Point(family, family, "propagated", True, "kept_frac", x, x, high / 2, 0.0, high, 8, 0)


def _kv(results: Results) -> Answer:
    found = kv_answer(
        results, OPTIONS, [ranking(results, one) for one in yardsticks(results, OPTIONS)]
    )
    assert found is not None
    return found


def _slow_smallest(curve: Sequence[Point], bound: float) -> Point | None:
    """Return the smallest x such that it and all points of larger x pass: the rule as written."""
    good = [p for p in curve if all(q.high < bound for q in curve if q.x >= p.x)]
    return min(good, key=lambda p: p.x) if good else None


def _slow_broken(points: list[Point], bound: float) -> float:
    """Return the largest measured x at or below which no point passes: the rule as written."""
    xs = [p.x for p in points if not any(q.high < bound for q in points if q.x <= p.x)]
    return max(xs, default=math.nan)


HIGHS = st.lists(st.floats(0, 0.2) | st.just(math.nan), max_size=8)


@given(HIGHS)
def test_the_smallest_passing_point_is_that_of_the_rule(highs: list[float]) -> None:
    curve = [_point(float(x), high) for x, high in enumerate(highs)]
    assert smallest(curve, KL.passes) == _slow_smallest(curve, KL.bound)


@given(HIGHS, HIGHS)
def test_what_breaks_is_that_of_the_rule(one: list[float], other: list[float]) -> None:
    curves = {
        family: [_point(float(x), high, family) for x, high in enumerate(highs)]
        for family, highs in (("a", one), ("b", other))
        if highs
    }
    points = [point for curve in curves.values() for point in curve]
    found = rank(curves, KL)
    wanted = _slow_broken(points, KL.bound)
    assert found.broken_frac == wanted or (math.isnan(found.broken_frac) and math.isnan(wanted))
    if found.broken is not None:
        assert found.broken.x <= found.broken_frac
        assert not KL.passes(found.broken)
    passing = {f: p for f, c in curves.items() if (p := _slow_smallest(c, KL.bound))}
    assert {p.family: p for p in found.passed} == passing
    assert {p.family for p in found.failed} == curves.keys() - passing.keys()


def _three_levels(folder: Path, num_propagated: int) -> Results:
    losses = {"local": same(0.05, 12), "predicted": same(0.02, 12)}
    cells = [
        Cell("good", 0.5, losses | {"propagated": same(0.03, num_propagated)}),
        Cell("good", 0.2, {"local": same(0.4, 12), "propagated": same(0.5, num_propagated)}),
        Cell("random", 0.5, {"local": same(0.6, 12), "propagated": same(0.9, num_propagated)}),
        Cell("oracle", 0.1, {"propagated": same(0.001, num_propagated)}, more={"causal": False}),
    ]
    return make(folder, cells)


def test_the_highest_level_with_eight_prompts_judges(tmp_path: Path) -> None:
    for num, level in ((8, "propagated"), (7, "predicted")):
        results = _three_levels(tmp_path / level, num)
        found = judging(results, OPTIONS)
        assert found is not None
        assert found.level == level
        said = _kv(results)
        assert f"level {level});" in said.verdict
        assert f"n\u00a0=\u00a0{8 if num == 8 else 12}" in said.verdict
    told = dict(said.findings)["Level propagated, judged apart"]
    assert told.startswith("no verdict: 7 prompts, 8 needed; as a lead, good at 50\u00a0% (KL 0.03")


def test_the_verdict_names_fraction_policy_interval_and_what_breaks(tmp_path: Path) -> None:
    said = _kv(_three_levels(tmp_path / "r", 8))
    assert "at 50\u00a0% of the cache with good (KL 0.03" in said.verdict
    assert said.verdict.endswith("above the bound of 0.1: 0 of 8 prompts.")
    findings = dict(said.findings)
    assert findings["Below that"].startswith("at 20\u00a0% of the cache or less no policy passes")
    assert "(random) passes nowhere" in findings["Chance and recency"]
    assert "streaming was not run" in findings["Chance and recency"]
    assert "oracle" not in said.verdict + str(said.findings)


def test_prompts_above_the_bound_are_counted(tmp_path: Path) -> None:
    losses = [*same(0.01, 11), 0.3]
    said = _kv(make(tmp_path / "r", [Cell("good", 0.5, {"propagated": losses})]))
    assert said.verdict.endswith("above the bound of 0.1: 1 of 12 prompts.")


def test_prompts_are_resampled_and_counted_not_their_samples(tmp_path: Path) -> None:
    losses = [0.01, 0.05] * 8
    names = [f"p{number // 2}#{number % 2}" for number in range(16)]
    cells = [Cell("good", 0.5, {"propagated": losses})]
    said = _kv(make(tmp_path / "r", cells, num_sequences=16, names=names))
    assert "KL 0.03\u00a0nats a token [0.03,\u00a00.03], n\u00a0=\u00a08" in said.verdict
    few = [Cell("good", 0.5, {"propagated": losses[:14]})]
    thin = _kv(make(tmp_path / "few", few, num_sequences=14, names=names[:14]))
    assert thin.verdict.startswith("No verdict at level propagated: 7 prompts, 8 needed")


def test_what_is_certified_on_other_prompts_is_named_first(tmp_path: Path) -> None:
    losses = {"propagated": same(0.01, 40)}
    for num, words in ((40, "good at kept=0.5 is certified: at most"), (12, "no policy is cert")):
        results = make(tmp_path / str(num), [Cell("good", 0.5, losses)], num_sequences=num)
        results.run["sequences"] = [{"sequence_id": f"p{number}#0"} for number in range(num)]
        name, told = _kv(results).findings[0]
        assert name == "Held to other prompts"
        assert "chosen and judged on the same prompts; on others " + words in told
        assert 'see "Which policy to use"' in told


def test_other_levels_are_told_apart(tmp_path: Path) -> None:
    findings = dict(_kv(_three_levels(tmp_path / "r", 8)).findings)
    assert "n\u00a0=\u00a012" in findings["Level local, judged apart"]
    assert "predicted KL" in findings["Level predicted, judged apart"]


def test_an_interval_beyond_the_bound_does_not_pass(tmp_path: Path) -> None:
    cells = [Cell("wide", 0.5, {"propagated": [0.0, 0.0, 0.2, 0.15] * 2})]
    said = _kv(make(tmp_path / "r", cells))
    assert "with no policy at any measured fraction" in said.verdict
    assert "wide at 50\u00a0%" in said.verdict


def test_two_sequences_let_nothing_pass_and_say_why(tmp_path: Path) -> None:
    said = _kv(load_results(make_results(tmp_path / "r", num_sequences=2)))
    assert said.verdict.startswith("No verdict at level local: 2 prompts, 8 needed")


def test_chance_that_passes_is_told(tmp_path: Path) -> None:
    cells = [
        Cell("random", 0.5, {"local": same(0.03, 8)}),
        Cell("good", 0.5, {"local": same(0.03, 8)}),
        Cell("streaming", 0.5, {"local": same(0.03, 7)}),
    ]
    findings = dict(_kv(make(tmp_path / "r", cells)).findings)
    assert "(random) passes too, from 50\u00a0%" in findings["Chance and recency"]
    assert "streaming is not judged: 7 prompts, 8 needed" in findings["Chance and recency"]


def test_a_transform_that_stores_everything_is_no_eviction(tmp_path: Path) -> None:
    cells = [
        Cell("int4", 0.4, {"local": same(0.03, 8)}, target=1.0),
        Cell("good", 0.6, {"local": same(0.05, 8)}),
    ]
    verdict = _kv(make(tmp_path / "r", cells)).verdict
    assert "at 40\u00a0% of the cache with int4" in verdict
    assert "Of policies that evict, good needs the least: 60\u00a0%" in verdict


def test_recall_is_judged_by_what_it_reads(tmp_path: Path) -> None:
    more = {"selects": True, "read_frac": 0.25}
    cells = [Cell("quest", 1.0, {"local": same(0.05, 8)}, target=0.25, more=more)]
    said = _kv(make(tmp_path / "r", cells))
    assert said.verdict.startswith("No policy that frees memory was replayed")
    assert dict(said.findings).keys() == {"Held to other prompts", "Reading less"}
    assert "a step reads 25\u00a0% of the cache" in dict(said.findings)["Reading less"]


def test_recall_alone_is_judged_at_the_highest_level_with_sequences_enough(tmp_path: Path) -> None:
    more = {"selects": True, "read_frac": 0.25}
    losses = {"local": same(0.05, 8), "propagated": same(0.01, 8)}
    results = make(tmp_path / "r", [Cell("quest", 1.0, losses, target=0.25, more=more)])
    findings = dict(_kv(results).findings)
    assert "KL 0.01" in findings["Reading less"]
    assert findings["Level local, judged apart"] == "no policy that frees memory was replayed."


@pytest.mark.parametrize("num", [1, 2])
def test_a_sequence_or_two_are_said_to_be_too_few_and_nothing_more(
    tmp_path: Path, num: int
) -> None:
    losses = {level: same(0.01, num) for level in ("local", "predicted", "propagated")}
    said = _kv(make(tmp_path / "r", [Cell("good", 0.5, losses)]))
    told = f"{num} prompt{'s' * (num > 1)}, 8 needed; as a lead, good at 50\u00a0%"
    assert said.verdict.startswith(f"No verdict at level local: {told}")
    findings = dict(said.findings)
    assert findings["Level propagated, judged apart"].startswith(f"no verdict: {told}")
    assert "passes nowhere" not in str(findings)


@pytest.mark.parametrize("measure", ["top_1_hit", "next_mass", "chance_mass"])
def test_attention_is_judged_without_a_measure_too(tmp_path: Path, measure: str) -> None:
    row = {"layer": ALL, "head": ALL, "domain": ANY, "level": "local", "n": 4}
    row |= {"mean": 0.5, "low": 0.4, "high": 0.6}
    names = {"top_1_hit", "next_mass", "chance_mass"} - {measure}
    rows = [row | {"measure": name} for name in sorted(names)]
    results = make(tmp_path / "r", [], tables={schema.ATTENDED_SUMMARY: rows}, vocab=True)
    found = attention_foretells.test(results, OPTIONS)
    assert (found.n == "4") == (measure == "top_1_hit")
    assert "most attended token" not in found.says


def test_estimators_without_halves_are_judged_by_the_summary(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", questions=("vocab",)))
    said = vocab_answer(results)
    assert said is not None
    assert said.verdict.startswith("lowrank reads the least")
    assert "same sequences" in said.rule


@pytest.mark.parametrize(
    ("verdict", "wanted"),
    [("kept", "are kept by best at size 512 for 20\u00a0%"), ("not suitable", "not suitable: no")],
)
def test_verdicts_of_halves_are_told(tmp_path: Path, verdict: str, wanted: str) -> None:
    row = {
        "domain": schema.ANY,
        "hit_level": 0.99,
        "verdict": verdict,
        "estimator": "best",
        "controller": "fixed",
        "size": 512,
        "hit_argmax": 0.997,
        "low": 0.991,
        "high": 1.0,
        "n": 8,
        "num_steps": 500,
        "cost_frac": 0.2,
        "set_size_mean": 600.0,
        "why": f"{verdict}: no",
    }
    results = make(tmp_path / "r", [], vocab=True, tables={schema.VERDICTS: [row]})
    said = vocab_answer(results)
    assert said is not None
    assert wanted in said.verdict
    assert "as if steps were independent" not in said.verdict
    sure = row | {"hit_argmax": 1.0, "low": 1 - 3 / 500}
    surely = vocab_answer(make(tmp_path / "s", [], vocab=True, tables={schema.VERDICTS: [sure]}))
    assert surely is not None
    assert ("1 \u2212 3 / 500 steps, as if" in surely.verdict) == (verdict == "kept")


def test_the_most_sensitive_layer_is_named(tmp_path: Path) -> None:
    rows = [
        {
            "rule": "rows:0.03",
            "layer": layer,
            "kv_head": schema.ALL,
            "level": "propagated",
            "kl_nats": 0.1 * (layer + 1),
            "low": 0.05,
            "high": 0.4,
            "n": 5,
            "share": (layer + 1) / 6,
            "rank": 3 - layer,
            "is_protected": layer == 2,
        }
        for layer in range(3)
    ]
    results = make(tmp_path / "r", [ONE], tables={schema.LAYER_SUMMARY: rows})
    said = layer_answer(results)
    assert said is not None
    assert "1 layer of 3 stands out: 2. Most: layer 2, KL 0.3" in said.verdict
    for is_protected, words in ((False, "no layer of 3 stands out"), (None, "no claim, there are")):
        alike = [row | {"is_protected": is_protected} for row in rows]
        folder = tmp_path / str(is_protected)
        said = layer_answer(make(folder, [ONE], tables={schema.LAYER_SUMMARY: alike}))
        assert said is not None
        assert words in said.verdict
        assert "The largest mean, no finding: layer 2" in said.verdict


def test_the_section_is_short_first_and_whole(tmp_path: Path) -> None:
    made = answer.section(_three_levels(tmp_path / "r", 8), OPTIONS)
    framed = made.blocks[0]
    assert isinstance(framed, Framed)
    texts = [one for one in framed.blocks if isinstance(one, Text)]
    items = [item for one in framed.blocks if isinstance(one, Items) for item in one.items]
    assert texts[0].look == "verdict"
    assert len(texts) + len(items) <= 12
    tables = [one.name for one in made.parts() if isinstance(one, HtmlTable)]
    assert len(set(tables)) == len(tables)


def _claims(results: Results) -> dict[str, list[str]]:
    made = answer.section(results, OPTIONS)
    folded = [one for one in made.blocks if isinstance(one, Details)][-1]
    table = folded.blocks[0]
    assert isinstance(table, HtmlTable)
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


WIDE = [0.0, 0.3] * 4


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        (same(0.02, 8), "supported"),
        (same(0.5, 8), "not supported"),
        (WIDE, "cannot be told here"),
        (same(0.02, 7), "cannot be told here"),
    ],
)
def test_seventy_percent_is_judged_by_the_bound(
    tmp_path: Path, losses: list[float], verdict: str
) -> None:
    cells = [
        Cell("good", 0.3, {"propagated": losses}),
        Cell("thin", 0.2, {"propagated": [0.01, 0.01]}),
    ]
    claims = _claims(make(tmp_path / "r", cells))
    assert claims["About 70\u00a0% of the cache can be dropped"][0] == verdict


def test_without_such_a_fraction_it_cannot_be_told(tmp_path: Path) -> None:
    claims = _claims(make(tmp_path / "r", [Cell("good", 0.5, {"local": same(0.01, 4)})]))
    assert claims["About 70\u00a0% of the cache can be dropped"][0] == "cannot be told here"
    assert claims["... with reasoning intact"][1] == "0 prompts of reasoning, 8 needed"


def test_reasoning_is_judged_on_reasoning_alone(tmp_path: Path) -> None:
    domains = ["reasoning"] * 8 + ["story"] * 4
    cells = [Cell("good", 0.3, {"local": same(0.01, 8) + [0.9] * 4})]
    claims = _claims(make(tmp_path / "r", cells, domains=domains))
    assert claims["... with reasoning intact"][0] == "supported"
    assert claims["About 70\u00a0% of the cache can be dropped"][0] == "cannot be told here"


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        (same(0.1, 8), "supported"),
        (same(0.3, 8), "not supported"),
        ([0.1, 0.3] * 4, "cannot be told here"),
        (same(0.1, 7), "cannot be told here"),
    ],
)
def test_attention_scores_must_beat_chance_and_recency(
    tmp_path: Path, losses: list[float], verdict: str
) -> None:
    cells = [
        Cell(family, 0.5, {"local": values})
        for family, values in (
            ("h2o:every=16", losses),
            ("random", same(0.4, 8)),
            ("streaming", same(0.2, 8)),
        )
    ]
    claims = _claims(make(tmp_path / "r", cells))
    assert claims["Tokens of low attention are the ones to drop"][0] == verdict


@pytest.mark.parametrize(
    ("slope", "verdict"), [(1, "supported"), (-1, "not supported"), (0, "cannot be told here")]
)
def test_depth_is_judged_by_sequence(tmp_path: Path, slope: int, verdict: str) -> None:
    rows = [
        {
            "sequence_id": f"p{number}#0",
            "rule": "rows:0.03",
            "layer": layer,
            "kv_head": schema.ALL,
            "level": "propagated",
            "kl_nats": 0.1 * (number + 1) + 0.01 * slope * layer + 0.001 * (-1) ** (number * layer),
        }
        for number in range(4)
        for layer in range(6)
    ]
    results = make(tmp_path / "r", [ONE], tables={schema.LAYER_RESULTS: rows})
    assert _claims(results)["Shallow layers tolerate most"][0] == verdict


@pytest.mark.parametrize(
    ("lows", "verdict"),
    [
        ((0.1, 0.2), "supported"),
        ((-0.3, -0.4), "not supported"),
        ((-0.1, -0.15), "cannot be told here"),
        ((0.1, -0.1), "cannot be told here"),
    ],
)
def test_stacking_multiplies_only_if_all_policies_say_so(
    tmp_path: Path, lows: tuple[float, float], verdict: str
) -> None:
    rows = [
        {"policy": f"p{low}", "level": "local", "measure": "output_error_sq", "n": 5}
        | {"interaction": low + 0.1, "low": low, "high": low + 0.2}
        for low in lows
    ]
    cells = [Cell("good", 0.5, {"local": same(0.05, 4)})]
    results = make(tmp_path / "r", cells, tables={schema.STACKING: rows})
    assert _claims(results)["Eviction and quantisation multiply their errors"][0] == verdict


@pytest.mark.parametrize(
    ("own", "sizes", "verdict"),
    [
        (0.9, (800.0, 900.0), "supported"),
        (0.7, (800.0, 900.0), "not supported"),
        (None, (800.0, 900.0), "cannot be told here"),
        (0.8, (800.0, 800.0), "cannot be told here"),
    ],
)
def test_sizes_that_never_differ_are_no_test_of_a_controller(
    tmp_path: Path, own: float | None, sizes: tuple[float, float], verdict: str
) -> None:
    rows = [
        {"sequence_id": f"p{number}#0", "estimator": "previous", "controller": "rate:gain=4"}
        | {"fit": fit, "size": 1024, "hit_argmax": hit, "num_scored": 1000, "set_size_mean": size}
        for number in range(4)
        for fit, size, hit in (
            ("own", sizes[0], (0.7, 0.9)[number % 2] if own is None else own),
            ("shuffled", sizes[1], 0.8),
        )
    ]
    results = make(tmp_path / "r", [ONE], tables={schema.VOCAB_RESULTS: rows})
    said = _claims(results)["Pruning should follow the rate of the entropy"]
    assert said[0] == verdict
    assert ("never differ between steps" in said[1]) == (sizes[0] == sizes[1])


def test_a_report_of_sections_loads_no_torch() -> None:
    code = "import sys, tracekit.report.sections; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
