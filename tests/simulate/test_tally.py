"""Columns of results against loops over rows, heads and tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kv.cases import Case, family, make_case, run_family
from tracekit import schema
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.simulate.accounts import shares
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
    buckets, index, by_steps = tally.columns()
    for at, steps in enumerate(buckets):
        columns = {key: values[at] for key, values in by_steps.items()}
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
    buckets, index, by_steps = tally.columns()
    assert buckets[0].name == schema.ANY
    columns = {key: values[0] for key, values in by_steps.items()}
    error_sq, norm_sq = result.measures.error_sq_NLHR[0], result.measures.norm_sq_LHR
    by_layer = [math.sqrt(error_sq[at].sum() / norm_sq[at].sum()) for at in range(2)]
    of_layers = columns["output_error"][(index[:, 0] >= 0) & (index[:, 1] == schema.ALL)]
    np.testing.assert_allclose(of_layers, by_layer)
    assert columns["output_error"][-1] == pytest.approx(np.mean(by_layer))
    assert (result.evicted_at_NLGT < NEVER).any()


def test_what_is_stored_and_fetched_has_its_bytes() -> None:
    case = make_case(rows=60, layers=2, size=4)
    policies = [parse("quest:read=0.3,page=4+int4:group=2,residual=4+tier:fast=0.4")]
    result = run_family(case, policies, POINT)
    policy, layer = policies[0], case.layer
    stack = Stack(
        policies, case.cache.layers, result, point=POINT, needle_T=NEEDLE, bytes_per_number=2
    )
    tally = Tally()
    tally.add(stack, 0)
    _, index, by_steps = tally.columns()
    columns = {key: values[0] for key, values in by_steps.items()}
    found = result.measures
    place = [tuple(one) for one in index].index((case.layers[1], 0))
    held, closed, read, fetched = (
        one[0, 1, 0].astype(float)
        for one in (found.held_NLGR, found.closed_NLGR, found.read_NLGR, found.fetched_NLGR)
    )
    plain = 2 * (layer.head_dim + layer.value_dim)
    size = closed * policy.transform.entry_bytes(layer, 2) + (held - closed) * plain
    size = size + policy.transform.fixed_bytes(layer, 2)
    assert closed.max() > 0
    assert fetched.max() > 0
    assert columns["kv_bytes"][place] == pytest.approx(size.mean())
    assert columns["fetched_bytes"][place] == pytest.approx((size / held * fetched).mean())
    index_bytes = policy.selector.index_bytes(layer, 2) * held
    assert columns["read_bytes"][place] == pytest.approx((size / held * read + index_bytes).mean())
    assert columns["hit_frac"][place] == pytest.approx(1 - fetched.sum() / read.sum())


def test_a_basis_is_part_of_what_is_held() -> None:
    case = make_case(rows=60, layers=2, size=4)
    policies = [parse("lowrank:rank=0.5,residual=4")]
    result = run_family(case, policies, POINT)
    stack = Stack(
        policies, case.cache.layers, result, point=POINT, needle_T=NEEDLE, bytes_per_number=2
    )
    fixed = policies[0].transform.fixed_bytes(case.layer, 2)
    assert fixed > 0
    found = result.measures
    less = 2 * 8 - policies[0].transform.entry_bytes(case.layer, 2)
    size = 2 * 8 * found.held_NLGR[0] - less * found.closed_NLGR[0] + fixed
    np.testing.assert_allclose(stack.rows["held"][0], size.sum((0, 1)))


def test_the_peak_is_that_of_each_cache_and_not_of_their_quotient() -> None:
    held, full = np.array([8.0, 4.0]), np.array([8.0, 16.0])
    names = ("padded", "read", "fetched", "state")
    found = shares({"held": held, "full": full} | dict.fromkeys(names, held))
    assert found["peak_frac"] == 8 / 16
    assert found["kept_frac"] == (1 + 1 / 4) / 2
    assert found["kept_end_frac"] == 1 / 4
