from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.fake import POLICIES, make_results, write_table
from tracekit.report.blocks import Absent, Section, Text
from tracekit.report.estimates import bare
from tracekit.report.figures.distance_curve import distance_curve, distance_rows
from tracekit.report.figures.figure import Figure
from tracekit.report.figures.measure import ERROR
from tracekit.report.formats import size
from tracekit.report.load import Point, Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections import lengths
from tracekit.report.tables import HtmlTable
from tracekit.schema import ALL, KV_RESULTS, SUMMARY, VOCAB_RESULTS
from tracekit.simulate.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

BUCKETS = ("< 256", "256 - 1k")
STEPS = ("1-16", "17-64", "65-256")


def lengthen(folder: Path, *, num_short: int = 4, reach: tuple[int, ...] = (8, 6, 2)) -> Path:
    """Give fake results length buckets and rows by steps, so many sequences a bucket of steps."""
    kv = pq.read_table(folder / "kv.parquet").to_pandas()
    names = dict.fromkeys(("family", "policy", "level", "steps", "bucket", "domain"), str)
    kv = kv.astype(names | {"sequence_id": str})
    order = {name: number for number, name in enumerate(kv["sequence_id"].unique())}
    place = kv["sequence_id"].map(order)
    kv["bucket"] = np.where(place < num_short, *BUCKETS)
    whole = kv[(kv["layer"] == ALL) & (kv["kv_head"] == ALL)]
    by_steps = [
        whole[whole["sequence_id"].map(order) < count].assign(
            steps=name, output_error=lambda f, k=number: f["output_error"] * (1 + k)
        )
        for number, (name, count) in enumerate(zip(STEPS, reach, strict=True))
    ]
    write_table(folder, KV_RESULTS, pd.concat([kv, *by_steps]))
    loaded = load_results(folder)
    columns = summarise(loaded.whole, loaded.table(VOCAB_RESULTS), seed=0)
    pq.write_table(SUMMARY.build(len(columns["mean"]), columns), folder / "summary.parquet")
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    made = make_results(tmp_path_factory.mktemp("l") / "r", num_sequences=8, questions=("kv",))
    return load_results(lengthen(made))


def parts(results: Results) -> dict[str, Any]:
    section = lengths.section(results, Options())
    assert isinstance(section, Section)
    return {part.name: part for part in section.parts() if isinstance(part, Figure | HtmlTable)}


def texts(results: Results) -> str:
    section = lengths.section(results, Options())
    assert isinstance(section, Section)
    return " ".join(part.text for part in section.parts() if isinstance(part, Text))


def shown(results: Results) -> dict[str, Point]:
    return {
        name: min(curve, key=lambda point: abs(point.x - 0.5))
        for name, curve in results.curves("kv", "output_error").items()
    }


def test_a_table_has_each_policy_in_each_bucket_at_the_same_policy(results: Results) -> None:
    table = parts(results)["table-lengths-50"]
    rows = [tuple(cell.text for cell in row) for row in table.rows]
    assert [row[:2] for row in rows] == [
        (family, bucket) for bucket in BUCKETS for family in sorted(POLICIES)
    ]
    labels = [column.label for column in table.columns]
    kv = results.whole
    for row in rows:
        policy = shown(results)[row[0]].name
        cells = kv[(kv["policy"] == policy) & (kv["bucket"] == row[1])]
        error = bare(float(cells["output_error"].mean()))
        told = row[labels.index("error (%), local")]
        assert told.startswith(f"{error} [")
        assert told.endswith(f" n={len(cells)}")
        held = (size(float(cells[one].mean())) for one in ("kv_bytes", "full_kv_bytes"))
        assert row[labels.index("cache, of full")] == " of ".join(held)


def test_the_other_fraction_leaves_out_what_is_the_same_policy(results: Results) -> None:
    first, second = (parts(results)[f"table-lengths-{one}"] for one in (50, 25))
    asked = [{(row[0].text, row[2].text) for row in table.rows} for table in (first, second)]
    assert not asked[0] & asked[1]


def test_two_buckets_have_a_figure_with_a_point_a_bucket(results: Results) -> None:
    table = parts(results)["loss-by-length-local"].table
    assert set(table["bucket"]) == set(BUCKETS)
    for row in table.to_dict("records"):
        cells = results.whole[
            (results.whole["policy"] == row["name"]) & (results.whole["bucket"] == row["bucket"])
        ]
        assert row["output_error"] == pytest.approx(cells["output_error"].mean(), rel=1e-5)
        assert row["n"] == len(cells) == 4


def test_the_words_count_policies_whose_intervals_do_not_overlap(results: Results) -> None:
    table = parts(results)["loss-by-length-local"].table
    more = less = 0
    for _, rows in table.groupby("family"):
        short, long = (rows[rows["bucket"] == one].iloc[0] for one in BUCKETS)
        more += long["low"] > short["high"]
        less += long["high"] < short["low"]
    assert (
        f"of {len(POLICIES)} policies {more} lose more on the longer texts and {less} less"
        in texts(results)
    )
    assert "The full cache grows from" in texts(results)


def test_one_bucket_has_a_table_and_no_figure(tmp_path: Path) -> None:
    made = make_results(tmp_path / "r", num_sequences=5, questions=("kv",))
    one = load_results(lengthen(made, num_short=5))
    assert "loss-by-length-local" not in parts(one)
    assert "table-lengths-50" in parts(one)
    assert "Texts of one length bucket alone" in texts(one)


def test_results_without_kv_policies_say_what_to_run(tmp_path: Path) -> None:
    made = make_results(tmp_path / "r", num_sequences=3, questions=("vocab",))
    assert isinstance(lengths.section(load_results(made), Options()), Absent)


def test_loss_by_distance_is_of_sequences_that_reach_all_buckets(results: Results) -> None:
    figure = parts(results)["loss-by-distance"]
    table = figure.table
    # The bucket that only two sequences reach has no interval: it ends before.
    assert set(table["bucket"]) == set(STEPS[:2])
    assert set(table["n"]) == {6}
    assert "2 that end earlier are left out" in figure.caption
    rows = distance_rows(results)
    reached = set(rows.loc[rows["steps"] == STEPS[1], "sequence_id"])
    for row in table.to_dict("records"):
        values = [
            one["output_error"]
            for one in rows.to_dict("records")
            if one["policy"] == row["name"]
            and one["steps"] == row["bucket"]
            and one["sequence_id"] in reached
        ]
        assert row["output_error"] == pytest.approx(sum(values) / len(values), rel=1e-6)
    assert f"the mean loss of {len(POLICIES)} of {len(POLICIES)} policies is larger" in texts(
        results
    )


def test_one_bucket_of_steps_has_no_curve(tmp_path: Path) -> None:
    made = make_results(tmp_path / "r", num_sequences=4, questions=("kv",))
    short = load_results(lengthen(made, reach=(4, 0, 0)))
    assert "loss-by-distance" not in parts(short)
    section = lengths.section(short, Options())
    assert isinstance(section, Section)
    assert any(isinstance(part, Absent) for part in section.parts())


cell = st.tuples(st.integers(0, 5), st.integers(0, 2))


@settings(max_examples=25)
@given(st.dictionaries(cell, st.floats(0.01, 1), max_size=18))
def test_distances_are_those_of_a_plain_count(values: dict[tuple[int, int], float]) -> None:
    rows = pd.DataFrame(
        [
            {
                "sequence_id": f"s{sequence}",
                "policy": "p",
                "level": "local",
                "steps": STEPS[step],
                "is_idle": False,
                "target_frac": 0.5,
                "kept_frac": 0.4 + value / 10,
                "num_scored": 16,
                "output_error": value,
            }
            for (sequence, step), value in values.items()
        ],
        columns=[
            "sequence_id",
            "policy",
            "level",
            "steps",
            "is_idle",
            "target_frac",
            "kept_frac",
            "num_scored",
            "output_error",
        ],
    )
    there = sorted({step for _, step in values})
    enough = [step for step in there if sum(one == step for _, one in values) >= 3]
    labels = [step for step in there if not enough or step <= max(enough)]
    same = [n for n in range(6) if all((n, step) in values for step in labels)]
    point = Point("p", "p", "predicted", True, "kept_frac", 0.5, 0.5, 0.1, 0.1, 0.1, 5, 0)
    found = distance_curve(rows, ERROR, {"p": point}, seed=0)
    if len(labels) < 2 or not same:
        assert found is None
        return
    assert found is not None
    assert list(found.labels) == [STEPS[step] for step in labels]
    kept = sum(0.4 + values[n, step] / 10 for n in same for step in labels)
    assert found.kept["p"] == pytest.approx(kept / len(same) / len(labels))
    for step, one in zip(labels, found.points["p"], strict=True):
        assert one.n == len(same)
        assert one.level == "local"
        assert one.mean == pytest.approx(sum(values[n, step] for n in same) / len(same))
