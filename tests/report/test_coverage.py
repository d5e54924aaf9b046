from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.fake import make_results
from tracekit.report.figures.cost_curve import cost_curve, members, priced
from tracekit.report.figures.coverage import ARGMAX, MASS, coverage
from tracekit.report.figures.tails import AT_NATS, exceedance, tails
from tracekit.report.load import Point, Results, load_results
from tracekit.report.sections.vocabulary.named import named
from tracekit.schema import SUMMARY


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(make_results(tmp_path_factory.mktemp("c") / "r", num_sequences=6))


def _of(results: Results, summary: pd.DataFrame) -> Results:
    return replace(results, _frames={SUMMARY.name: summary})


@pytest.mark.parametrize("family", ["$\\frac{x}{", "<b>&\"'", "\u7b56\u7565", "a\u202eb", "x" * 90])
def test_a_strange_name_is_drawn_as_text(results: Results, family: str) -> None:
    summary = results.summary.replace({"family": {"lowrank": family}})
    strange = _of(results, summary)
    looks = named(strange).looks
    assert family in looks
    for figure in (coverage(strange, MASS, looks, 1024), cost_curve(strange, looks)):
        assert figure is not None
        assert "<b>" not in figure.svg
        assert "\u202e" not in figure.svg
        assert figure.svg.endswith("</svg>")


def test_coverage_tells_the_best_named_method_and_never_the_bound(results: Results) -> None:
    figure = coverage(results, ARGMAX, named(results).looks, 1024)
    there = figure.table[figure.table["size"] == 1024].set_index("family")["hit_argmax"]
    assert there.idxmax() == "oracle"
    assert there.drop("oracle").idxmax() == "lowrank"
    assert "lowrank" in figure.alt
    assert "oracle" not in figure.alt


def test_without_costs_there_is_no_cost_curve(results: Results) -> None:
    summary = results.summary[results.summary["measure"] != "cost_frac"]
    poor = _of(results, summary)
    assert cost_curve(poor, {}) is None
    assert named(poor).methods == ()


def test_the_cost_curve_holds_cost_and_coverage_of_each_cell(results: Results) -> None:
    costs, hits = (results.means("vocab", one) for one in ("cost_frac", "hit_argmax"))
    points = [point for curve in priced(results).values() for point in curve]
    assert {point.cell: (point.x, point.mean) for point in points} == {
        cell: (costs[cell], hits[cell]) for cell in hits
    }


_SPOTS = st.tuples(
    st.sampled_from([0.1, 0.2, 0.5, 0.9, 1.0, 1.2]),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    st.booleans(),
)


@given(st.lists(_SPOTS, max_size=12))
def test_the_front_is_what_no_method_below_the_full_head_beats(
    spots: list[tuple[float, float, bool]],
) -> None:
    points = [
        Point("f", str(place), "local", causal, "size", 8.0, cost, hit, math.nan, math.nan, 1, 0)
        for place, (cost, hit, causal) in enumerate(spots)
    ]
    expected = set()
    for one in points:
        if not one.causal or one.x >= 1:
            continue
        beaten = False
        for other in points:
            if other.causal and other.x < 1 and other.x <= one.x and other.mean >= one.mean:
                beaten |= other.x < one.x or other.mean > one.mean
        if not beaten:
            expected.add(one.name)
    found = members(points)
    assert {one.name for one in found} == expected
    assert [one.x for one in found] == sorted(one.x for one in found)


_STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.02, 0.1, 0.5, 3.0, math.inf])),
    min_size=1,
    max_size=30,
)


@settings(max_examples=8, deadline=None)
@given(_STEPS)
def test_tails_are_counted_step_by_step_and_resampled_by_sequence(
    steps: list[tuple[int, float]],
) -> None:
    rows = pd.DataFrame(steps, columns=["sequence_id", "neg_log_mass_nats"]).astype(
        {"sequence_id": str}
    )
    names = list(dict.fromkeys(rows["sequence_id"]))
    drawn = np.random.default_rng(3).integers(len(names), size=(1000, len(names))).tolist()
    for nats, share, low, high, n in exceedance(rows, seed=3):
        assert share == pytest.approx(sum(loss > nats for _, loss in steps) / len(steps))
        assert n == len(names)
        if n < 3:
            assert math.isnan(low)
            assert math.isnan(high)
            continue
        above = [sum(str(one) == name and loss > nats for one, loss in steps) for name in names]
        all_of = [sum(str(one) == name for one, _ in steps) for name in names]
        shares = [
            sum(above[one] for one in draw) / sum(all_of[one] for one in draw) for draw in drawn
        ]
        ends = np.quantile(shares, [(1 - 0.95) / 2, (1 + 0.95) / 2], method="inverted_cdf")
        assert (low, high) == pytest.approx(tuple(ends))


def test_a_line_of_tails_ends_where_no_step_loses_more(results: Results) -> None:
    looks = named(results).looks
    candidates = pd.DataFrame(
        {
            "family": ["lowrank"] * 3 + ["frequency"] * 3,
            "sequence_id": ["a", "b", "c"] * 2,
            "neg_log_mass_nats": [0.05, 0.0, 0.4, 9.0, math.inf, 2.5],
        }
    )
    figure = tails(results, candidates, looks, 1024)
    assert figure is not None
    share = figure.table.set_index(["family", "above_nats"])["share_of_steps"]
    assert share["lowrank", 0.03] == pytest.approx(2 / 3)
    assert share["lowrank", 1.0] == 0
    assert share["frequency", AT_NATS[-1]] == pytest.approx(2 / 3)
    assert "lowrank" in figure.alt
    assert tails(results, candidates.assign(family="unknown"), looks, 1024) is None


def test_one_size_of_one_estimator_is_drawn(results: Results) -> None:
    rows = results.summary
    one = rows[(rows["family"] == "frequency") & (rows["target"] == 512)]
    poor = _of(results, one.assign(low=np.nan, high=np.nan, n=1))
    chosen = named(poor)
    assert chosen.methods == ("frequency",)
    assert chosen.size == 512
    figure = coverage(poor, ARGMAX, chosen.looks, chosen.size)
    assert len(figure.table) == 1
    assert "no interval below 3" in figure.alt


def test_the_same_results_give_the_same_pictures(results: Results) -> None:
    looks = named(results).looks
    again = replace(results, _frames={})
    assert coverage(results, ARGMAX, looks, 1024).svg == coverage(again, ARGMAX, looks, 1024).svg
