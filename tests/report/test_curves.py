from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.test_front import slow_front
from tests.report.fake import POLICIES, make_results, write_table
from tracekit.report.blocks import Absent, Section
from tracekit.report.figures.canvas import styles
from tracekit.report.figures.figure import Figure
from tracekit.report.figures.measure import ERROR, HALF, KL, SAME_TOP, chosen_names, nearest
from tracekit.report.figures.measure_curve import Curves, measure_curve
from tracekit.report.figures.pareto import NAME, pareto
from tracekit.report.figures.perplexity import perplexity_changes
from tracekit.report.load import Point, Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections import curves
from tracekit.schema import ALL, KV_RESULTS, SUMMARY, VOCAB_RESULTS
from tracekit.simulate.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

ORACLE = "oracle"
QUEST = "quest"


def deepen(folder: Path, *, given_text: int = 0, seed: int = 0) -> Path:
    """Give fake results a full cache, a bound, a recall policy, flags and level propagated."""
    rng = np.random.default_rng(seed)
    kv = pq.read_table(folder / "kv.parquet").to_pandas()
    names = dict.fromkeys(("family", "policy", "level", "steps", "bucket", "domain"), str)
    kv = kv.astype(names | {"sequence_id": str})
    whole = kv[(kv["layer"] == ALL) & (kv["kv_head"] == ALL)]
    h2o = whole[whole["family"] == "h2o"]
    oracle = h2o.assign(family=ORACLE, causal=False, policy="oracle:" + h2o["policy"])
    oracle["output_error"] *= 0.02
    quest = h2o.assign(family=QUEST, selects=True, policy="quest:" + h2o["policy"])
    quest = quest.assign(read_frac=quest["kept_frac"], kept_frac=1.02)
    one = h2o[h2o["target_frac"] == HALF]
    none = {"target_frac": 1.0, "kept_frac": 1.0, "num_evicted": 0, "output_error": 0.0}
    full = one.assign(family="full", policy="full:kept=1", kv_bytes=one["full_kv_bytes"], **none)
    local = pd.concat([whole, oracle, quest, full])
    kl = 0.5 * local["output_error"] ** 2 * np.exp(0.1 * rng.normal(size=len(local)))
    run = local.assign(
        level="propagated",
        kl_nats=kl,
        noise_kl_nats=1e-9,
        same_top_frac=np.exp(-kl),
        nll_full=1.5,
        nll_pruned=1.5 + kl,
        output_error=None,
    )
    run.loc[run["policy"] == "h2o:kept=0.1", "is_clipped"] = True
    layers = kv[kv["layer"] != ALL]
    frame = pd.concat([local, layers, run]).reset_index(drop=True)
    write_table(folder, KV_RESULTS, frame)
    loaded = load_results(folder)
    columns = summarise(loaded.whole, loaded.table(VOCAB_RESULTS), seed=0)
    pq.write_table(SUMMARY.build(len(columns["mean"]), columns), folder / "summary.parquet")
    return folder


def made(results: Results) -> Section:
    section = curves.section(results, Options())
    assert isinstance(section, Section)
    return section


def changed(results: Results, **parts: Any) -> Results:
    """Return results some of whose frames are others than those of the folder."""
    new = Results(folder=results.folder, run=parts.pop("run", results.run), spec=results.spec)
    vars(new).update({"whole": results.whole} | parts)
    return new


def figures(section: Section) -> dict[str, Any]:
    return {part.name: part for part in section.parts() if isinstance(part, Figure)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = make_results(tmp_path_factory.mktemp("c") / "r", num_sequences=6, questions=("kv",))
    return load_results(deepen(folder))


@pytest.fixture(scope="module")
def shown(results: Results) -> dict[str, Any]:
    return figures(made(results))


def point(x: float, mean: float, *, name: str = "p", **more: Any) -> Point:
    return Point(name, name, "propagated", True, "kept_frac", x, x, mean, mean, mean, 5, 0, **more)


def test_levels_and_axes_have_figures_of_their_own(shown: dict[str, Any]) -> None:
    names = set(shown)
    assert names == {
        "output-error-local-by-kept-frac",
        "output-error-local-by-read-frac",
        "kl-nats-propagated-by-kept-frac",
        "kl-nats-propagated-by-read-frac",
        "same-top-frac-propagated-by-kept-frac",
        "same-top-frac-propagated-by-read-frac",
        NAME,
    }
    for name, figure in shown.items():
        assert set(figure.table["level"]) == {"local" if "local" in name else "propagated"}
        families = set(figure.table["family"])
        assert families == {QUEST} if "read-frac" in name else QUEST not in families


def test_levels_that_are_not_there_say_what_to_run(results: Results) -> None:
    absent = [part for part in made(results).parts() if isinstance(part, Absent)]
    assert [one.command for one in absent] == [
        "tracekit record --model MODEL --text FILE -o TRACE",
        "tracekit simulate TRACE -o RESULTS --level predicted",
    ]
    empty = changed(results, summary=results.summary.iloc[:0])
    assert isinstance(curves.section(empty, Options()), Absent)


def test_bounds_are_named_as_such_and_are_not_on_the_front(shown: dict[str, Any]) -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)<", shown["output-error-local-by-kept-frac"].svg)
    assert "oracle (bound)" in texts
    assert "Bounds look at later rows" in shown["output-error-local-by-kept-frac"].caption
    assert "(oracle at" not in shown["output-error-local-by-kept-frac"].alt.split("most of all")[0]
    assert set(shown[NAME].table["family"]) == set(POLICIES)


def test_the_front_in_the_table_is_the_front_of_kept_fraction_and_kl(shown: dict[str, Any]) -> None:
    table = shown[NAME].table
    expected = slow_front(table["kept_frac"].to_list(), table["kl_nats"].to_list())
    assert table["is_front"].to_list() == expected
    members = table[table["is_front"]]
    assert members["kv_bytes"].notna().all()
    caption = shown[NAME].caption
    assert all(f"{family} at" in caption for family in members["family"])
    assert "100\u00a0% is" in shown[NAME].svg


def test_clipped_cells_are_counted_and_ringed(shown: dict[str, Any]) -> None:
    figure = shown["kl-nats-propagated-by-kept-frac"]
    flagged = figure.table[figure.table["num_clipped"] > 0]
    assert set(flagged["family"]) == {"h2o"}
    assert int(flagged["num_clipped"].sum()) == 6
    assert "(6 cells)" in figure.caption
    assert "Ringed" not in shown["output-error-local-by-kept-frac"].caption


def test_left_out_cells_are_counted(results: Results) -> None:
    idle = results.summary.assign(num_excluded=2)
    figure = figures(made(changed(results, summary=idle)))
    points = len(figure["output-error-local-by-kept-frac"].table)
    assert f"{2 * points} cells" in figure["output-error-local-by-kept-frac"].caption


def test_nothing_is_drawn_at_or_below_the_noise_floor() -> None:
    points = {"p": [point(0.2, 0.5), point(0.5, 1e-4), point(0.7, 9e-5)]}
    shown = Curves(measure=KL, x_name="kept_frac", points=points, noise_nats=1e-4)
    assert shown.drawn == {"p": [points["p"][0]]}
    figure = measure_curve(shown, styles("p"))
    assert figure is not None
    assert "2 points at or below it are not drawn" in figure.caption
    assert len(figure.table) == 3
    all_noise = replace(shown, noise_nats=1.0)
    assert measure_curve(all_noise, styles("p")) is None


def test_a_noise_floor_near_the_data_is_a_line_a_far_one_is_words() -> None:
    points = {"p": [point(0.2, 0.5), point(0.5, 2e-4)]}
    for noise, is_there in ((1e-4, True), (1e-9, False)):
        shown = Curves(measure=KL, x_name="kept_frac", points=points, noise_nats=noise)
        figure = measure_curve(shown, styles("p"))
        assert figure is not None
        assert ("noise floor" in figure.svg) == is_there
        assert "Rounding alone makes" in figure.caption


def test_an_axis_is_logarithmic_where_values_span_decades_and_linear_elsewhere() -> None:
    assert KL.spans_decades([point(0.1, 1.0), point(0.5, 0.01)])
    assert not KL.spans_decades([point(0.1, 1.0), point(0.5, 0.5)])
    assert not KL.spans_decades([point(0.1, 1.0), point(0.5, -0.001)])
    assert not SAME_TOP.spans_decades([point(0.1, 1.0), point(0.5, 0.01)])
    assert not KL.spans_decades([])


def test_more_is_better_where_it_is() -> None:
    points = [point(0.1, 0.3), point(0.5, 0.9)]
    assert SAME_TOP.best(points).mean == ERROR.worst(points).mean == 0.9
    assert SAME_TOP.worst(points).mean == ERROR.best(points).mean == 0.3


def test_many_policies_leave_the_worst_grey_and_say_which() -> None:
    points = {f"p{n:02d}": [point(0.5, n + 1.0, name=f"p{n:02d}")] for n in range(20)}
    points["p19"] = [replace(points["p19"][0], causal=False)]
    named = chosen_names(points, KL)
    assert named == ["p19", *(f"p{n:02d}" for n in range(11))]
    figure = measure_curve(Curves(measure=KL, x_name="kept_frac", points=points), styles(points))
    assert figure is not None
    assert (
        f"Grey, without a name: {', '.join(f'p{n:02d}' for n in range(11, 19))}." in figure.caption
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_the_nearest_point_is_the_nearest(xs: list[float], frac: float) -> None:
    found = nearest([point(x, 1.0) for x in xs], frac)
    assert all(abs(found.x - frac) <= abs(x - frac) for x in xs)


def test_one_point_without_interval_is_drawn() -> None:
    lone = replace(point(0.5, 0.2), low=math.nan, high=math.nan, n=1)
    figure = measure_curve(
        Curves(measure=ERROR, x_name="kept_frac", points={"p": [lone]}), styles("p")
    )
    assert figure is not None
    assert "n\u00a0=\u00a01;" in figure.caption
    assert len(figure.table) == 1


def test_policies_that_lose_nothing_at_all_are_drawn_on_a_linear_axis() -> None:
    points = {"p": [point(0.2, 0.0), point(0.5, 0.0)]}
    figure = measure_curve(Curves(measure=KL, x_name="kept_frac", points=points), styles("p"))
    assert figure is not None
    assert "full cache" in figure.svg


def test_perplexity_is_that_of_given_text_alone(results: Results) -> None:
    assert perplexity_changes(results) == {}
    sequences = [dict(one) for one in results.run["sequences"]]
    for one in sequences[:4]:
        one["text_source"] = "given"
    some = changed(results, run=results.run | {"sequences": sequences})
    given_ids = {one["sequence_id"] for one in sequences[:4]}
    found = perplexity_changes(some)
    assert set(found) == {*POLICIES, ORACLE}
    assert set(perplexity_changes(some, "read_frac")) == {QUEST}
    rows = some.whole[some.whole["level"] == "propagated"]
    for curve in found.values():
        assert [p.x for p in curve] == sorted(p.x for p in curve)
        for found_point in curve:
            logs = [
                row["nll_pruned"] - row["nll_full"]
                for row in rows.to_dict("records")
                if row["policy"] == found_point.name and row["sequence_id"] in given_ids
            ]
            assert found_point.n == len(logs) == 4
            assert found_point.mean == pytest.approx(math.exp(sum(logs) / 4) - 1, rel=1e-5)
            assert found_point.low <= found_point.mean <= found_point.high
    names = set(figures(made(some)))
    assert "perplexity-change-frac-propagated-by-kept-frac" in names


def test_the_same_results_give_the_same_figures(results: Results, shown: dict[str, Any]) -> None:
    again = load_results(results.folder)
    again_shown = figures(made(again))
    assert {n: (f.content, f.csv, f.caption) for n, f in shown.items()} == {
        n: (f.content, f.csv, f.caption) for n, f in again_shown.items()
    }


def test_a_front_of_one_point_is_drawn() -> None:
    figure = pareto(KL, {"p": [point(0.5, 0.1)]}, styles("p"), {}, math.nan)
    assert figure.table["is_front"].to_list() == [True]
    assert "1 of 1 points" in figure.alt


@pytest.mark.parametrize(("x", "is_half"), [(0.5, True), (0.7, False)])
def test_the_text_speaks_of_half_only_where_half_was_measured(x: float, is_half: bool) -> None:
    points = {"p": [point(x, 0.1)]}
    figure = measure_curve(Curves(measure=KL, x_name="kept_frac", points=points), styles("p"))
    assert figure is not None
    assert ("at half or less" in figure.alt) is is_half
