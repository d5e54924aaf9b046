"""Columns of results against loops over rows, heads and tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kv.cases import Case, family, make_case, run_family
from tracekit import schema
from tracekit.kv.engine import NEVER
from tracekit.simulate.columns import Stack
from tracekit.simulate.steps import step_buckets
from tracekit.simulate.tally import Tally

POINT = 20
NEEDLE = np.array([3, 11])
CASES = {
    "plain": {"groups": 2, "group_size": 2},
    "sliding": {"groups": 2, "group_size": 1, "window": 13},
}


def test_buckets_of_steps_start_at_the_eviction_point() -> None:
    names = [(one.name, one.start, one.end) for one in step_buckets(0, 70)]
    assert names == [("all", 0, 70), ("1-16", 0, 16), ("17-64", 16, 64), ("65-256", 64, 70)]
    cut = [(one.name, one.start, one.end) for one in step_buckets(20, 10)]
    assert cut == [("all", 0, 10), ("17-64", 0, 10)]
    assert [one.name for one in step_buckets(0, 5000)][-1] == ">4096"
    assert [one.name for one in step_buckets(0, 1)] == ["all", "1-16"]


def tallied(case: Case, text: str, kept: str) -> tuple[Tally, object]:
    policies = family(text, [kept])
    result = run_family(case, policies, POINT)
    layers = case.cache.layers
    stack = Stack(policies, layers, result, point=POINT, needle_T=NEEDLE, bytes_per_number=2)
    tally = Tally()
    tally.add(stack, 0)
    return tally, result


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("text", ["h2o:every=5", "knorm", "window"])
def test_columns_equal_loops(name: str, text: str) -> None:
    case = make_case(rows=60, layers=2, **CASES[name])
    tally, result = tallied(case, text, "0.4")
    evicted_at = result.evicted_at_NLGT[0]
    size = 2 * (case.layer.head_dim + case.layer.value_dim)
    window = case.layer.window or 10**9
    num_heads = case.layer.num_kv_heads
    for steps, index, columns in tally.columns():
        rows = range(POINT + steps.start, POINT + steps.end)
        for place, (layer, head) in enumerate(index):
            layers = range(2) if layer == schema.ALL else [list(case.layers).index(layer)]
            heads = range(num_heads) if head == schema.ALL else [head]
            found = {key: values[place] for key, values in columns.items()}
            parts = [(at, g) for at in layers for g in heads]

            def held(at: int, g: int, row: int) -> list[int]:
                return [
                    j for j in range(row + 1) if evicted_at[at, g, j] > row and j > row - window
                ]

            bytes_by_row = [size * sum(len(held(*p, row)) for p in parts) for row in rows]
            full_by_row = [size * len(parts) * min(row + 1, window) for row in rows]
            assert found["kv_bytes"] == pytest.approx(np.mean(bytes_by_row))
            assert found["peak_kv_bytes"] == max(bytes_by_row)
            assert found["full_kv_bytes"] == pytest.approx(np.mean(full_by_row))
            shares = [a / b for a, b in zip(bytes_by_row, full_by_row, strict=True)]
            assert found["kept_frac"] == pytest.approx(np.mean(shares))
            assert found["kept_end_frac"] == pytest.approx(shares[-1])
            assert found["read_frac"] == pytest.approx(found["kept_frac"])
            longest = [
                size * sum(len(heads) * max(len(held(at, g, row)) for g in heads) for at in layers)
                for row in rows
            ]
            padded = [a / b for a, b in zip(longest, full_by_row, strict=True)]
            if head == schema.ALL:
                assert found["padded_frac"] == pytest.approx(np.mean(padded))
            gone = [
                (at, g, j)
                for at, g in parts
                for j in range(rows[-1] + 1)
                if evicted_at[at, g, j] <= rows[-1]
            ]
            assert found["num_evicted"] == len(gone)
            if gone:
                ages = [evicted_at[p] - p[2] for p in gone]
                if layer != schema.ALL:
                    assert found["evicted_age_tokens"] == pytest.approx(np.mean(ages))
            erased = [
                all(evicted_at[at, g, j] <= rows[-1] for at, g in parts)
                for j in range(rows[-1] + 1)
            ]
            assert found["erased_frac"] == pytest.approx(np.mean(erased))
            needle = [
                float(j in held(at, g, row)) for at, g in parts for row in rows for j in NEEDLE
            ]
            assert found["needle_kept"] == pytest.approx(np.mean(needle))
            later = [p for p in gone if evicted_at[p] > POINT and evicted_at[p] >= rows[0]]
            assert found["churn"] == pytest.approx(len(later) / len(rows) / len(parts))


def test_errors_of_a_layer_are_of_its_heads_together_and_of_all_the_mean_of_layers() -> None:
    case = make_case(rows=40, layers=2)
    tally, result = tallied(case, "knorm", "0.3")
    steps, index, columns = next(iter(tally.columns()))
    assert steps.name == schema.ANY
    error_sq, norm_sq = result.measures.error_sq_NLHR[0], result.measures.norm_sq_LHR
    by_layer = [math.sqrt(error_sq[at].sum() / norm_sq[at].sum()) for at in range(2)]
    of_layers = columns["output_error"][(index[:, 0] >= 0) & (index[:, 1] == schema.ALL)]
    np.testing.assert_allclose(of_layers, by_layer)
    assert columns["output_error"][-1] == pytest.approx(np.mean(by_layer))
    assert (result.evicted_at_NLGT < NEVER).any()
