"""Eviction and a transform: each alone, together, and the interaction."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.kv.cases import family, make_case, run_family
from tracekit import schema
from tracekit.kv.parse import parse
from tracekit.simulate.stacking import ERROR_BOUND, parts_of, stacking

TOGETHER = "h2o:kept=0.5+int4"


def frame_of(errors: dict[str, list[float | None]], **columns) -> pd.DataFrame:
    """Return results of policies, one output error a sequence, as read from Parquet."""
    tables = [
        schema.KV_RESULTS.build(
            len(values),
            {
                "sequence_id": [f"s{i}#0" for i in range(len(values))],
                "policy": parse(text).text,
                "level": "local",
                "layer": schema.ALL,
                "kv_head": schema.ALL,
                "steps": schema.ANY,
                "target_frac": 0.5,
                "kept_frac": 0.2,
                "num_evicted": 7,
                "output_error": values,
            }
            | columns,
        ).to_pandas()
        for text, values in errors.items()
    ]
    return pd.concat([table.astype({"policy": str, "sequence_id": str}) for table in tables])


def rows_of(frame: pd.DataFrame) -> list[dict]:
    columns = stacking(frame, seed=3)
    num_rows = len(columns["policy"])
    return schema.STACKING.build(num_rows, columns).to_pylist()


THREE = {
    "h2o:kept=0.5": [0.3, 0.4, 0.5, 0.2],
    "int4": [0.04, 0.03, 0.05, 0.06],
    TOGETHER: [0.31, 0.45, 0.5, 0.25],
}


def test_the_interaction_is_what_both_cost_beyond_the_sum_of_each_alone():
    first, squared = rows_of(frame_of(THREE))
    a, b, both = (np.array(values) for values in THREE.values())
    for row, power in ((first, 1), (squared, 2)):
        true = both**power - (a**power + b**power)
        assert row["interaction"] == pytest.approx(true.mean())
        assert row["low"] <= row["interaction"] <= row["high"]
        assert true.min() - 1e-7 <= row["low"]
        means = [row[f"{name}_mean"] for name in ("eviction", "transform", "together")]
        assert means == pytest.approx([(one**power).mean() for one in (a, b, both)])
        assert row["n"] == 4
        assert row["kept_frac"] == pytest.approx(0.2)
    assert (first["measure"], squared["measure"]) == ("output_error", "output_error_sq")
    assert parse(first["policy"]) == parse(TOGETHER)
    assert parse(first["eviction"]) == parse("h2o:kept=0.5")
    assert parse(first["transform"]) == parse("int4")


def test_sequences_are_matched_by_name_and_only_those_with_all_three_count():
    frame = frame_of(THREE)
    frame = frame[(frame["policy"] != parse("int4").text) | (frame["sequence_id"] != "s2#0")]
    row = rows_of(frame.sample(frac=1, random_state=0))[0]
    assert row["n"] == 3
    true = np.mean([0.31 - 0.34, 0.45 - 0.43, 0.25 - 0.26])
    assert row["interaction"] == pytest.approx(true, abs=1e-7)


def test_a_part_that_was_not_run_leaves_nulls_and_no_sequence():
    rows = rows_of(frame_of({name: THREE[name] for name in ("int4", TOGETHER)}))
    assert [row["n"] for row in rows] == [0, 0]
    assert rows[0]["interaction"] is None
    assert rows[0]["together_mean"] is None
    assert rows[0]["exceeds_error_bound"] is None


def test_sequences_without_an_eviction_are_counted_and_not_averaged():
    frame = frame_of(THREE)
    idle = (frame["policy"] == parse(TOGETHER).text) & (frame["sequence_id"] == "s1#0")
    frame.loc[idle, "num_evicted"] = 0
    row = rows_of(frame)[0]
    assert (row["n"], row["num_excluded"]) == (3, 1)
    assert row["together_mean"] == pytest.approx(np.mean([0.31, 0.5, 0.25]))


@pytest.mark.parametrize(("error", "exceeds"), [(ERROR_BOUND / 2, False), (ERROR_BOUND * 2, True)])
def test_a_transform_that_alone_costs_more_than_the_bound_is_named(error, exceeds):
    row = rows_of(frame_of(THREE | {"int4": [error] * 4}))[0]
    assert row["exceeds_error_bound"] is exceeds
    assert row["error_bound"] == ERROR_BOUND


def test_perplexity_is_null_where_the_level_has_none_and_judged_where_it_has():
    row = rows_of(frame_of(THREE))[0]
    assert row["perplexity_change"] is None
    assert row["exceeds_perplexity_bound"] is None
    known = {"nll_full": np.log(10.0), "nll_pruned": np.log(12.5), "level": "propagated"}
    row = rows_of(frame_of(THREE, **known))[0]
    assert row["perplexity_change"] == pytest.approx(2.5, abs=1e-5)
    assert row["exceeds_perplexity_bound"] is True
    assert row["level"] == "propagated"


def test_rows_of_one_layer_or_of_some_steps_are_left_alone():
    others = [frame_of(THREE, layer=3), frame_of(THREE, kv_head=0), frame_of(THREE, steps="1-16")]
    assert rows_of(pd.concat([frame_of(THREE), *others])) == rows_of(frame_of(THREE))


def test_results_without_a_stacked_policy_make_no_row():
    frame = frame_of({name: THREE[name] for name in ("h2o:kept=0.5", "int4")})
    assert rows_of(frame) == []
    assert rows_of(frame.iloc[:0]) == []


@pytest.mark.parametrize(
    ("text", "eviction", "transform"),
    [
        (TOGETHER, "h2o:kept=0.5", "int4"),
        (
            "knorm:kept=0.3,at=context+int8:group=16",
            "knorm:kept=0.3,at=context",
            "full:at=context+int8:group=16",
        ),
        ("random:every=5,from=9+fp8", "random:every=5,from=9", "full:at=9+fp8"),
        ("random:at=turn+fp8", "random:at=turn", "full:at=turn+fp8"),
        (
            "h2o:every=2,above=50+int4",
            "h2o:every=2,above=50",
            "full:every=2,from=prompt,above=50+int4",
        ),
    ],
)
def test_a_stacked_policy_is_taken_apart_at_its_own_point(text, eviction, transform):
    parts = parts_of(parse(text))
    assert parts.eviction == parse(eviction)
    assert parts.transform == parse(transform)
    assert parse(parts.transform.text) == parts.transform


@pytest.mark.parametrize("text", ["full", "int4", "h2o:kept=0.5", "h2o"])
def test_a_policy_that_is_not_stacked_has_no_parts(text):
    assert parts_of(parse(text)) is None


def test_a_transform_alone_closes_what_it_closes_under_later_decisions():
    case = make_case(rows=40)
    every = "full:every=2,from=prompt+int4:group=3,residual=2"
    (policy,) = family("h2o:every=2+int4:group=3,residual=2", ["0.5"])
    one, two = (
        run_family(case, [each], 20).measures for each in (parts_of(policy).transform, parse(every))
    )
    np.testing.assert_array_equal(one.closed_NLGR, two.closed_NLGR)
    np.testing.assert_allclose(one.error_sq_NLHR, two.error_sq_NLHR, atol=1e-12)
