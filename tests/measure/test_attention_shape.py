"""Attention statistics against loops over rows and keys, and against closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_attention as slow
from tracekit.measure import attention_shape
from tracekit.measure.attention_shape import (
    MASS_PERCENT,
    Rows,
    attention_blocks,
    half_life,
    jaccard,
    jaccard_with_others,
    needed_keys,
    num_common,
    persistence,
    ranks_of,
    row_shape,
    top_keys,
)
from tracekit.spec import LayerSpec

SIZE = 4


@st.composite
def layers(draw: st.DrawFn) -> LayerSpec:
    groups, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = groups * group_size
    window = draw(st.none() | st.integers(1, 12))
    return LayerSpec(
        index=0,
        kind="full" if window is None else "sliding",
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=SIZE,
        value_dim=SIZE,
        scale=draw(st.sampled_from([0.0, 0.5, 3.0])),
        window=window,
        softcap=draw(st.none() | st.just(4.0)),
        sinks=tuple(map(float, range(heads))) if draw(st.booleans()) else None,
    )


def random(*shape: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def rows_of(weights: Any, *, first_query: int = 0, first_key: int = 0) -> Rows:
    """Return the rows of one head over keys that are all seen up to the query."""
    weights_HQK = torch.tensor(weights, dtype=torch.float64)[None]
    queries, keys = weights_HQK.shape[1:]
    seen = torch.arange(keys) + first_key <= torch.arange(queries)[:, None] + first_query
    return Rows(weights_HQK, seen, torch.ones(1, queries), first_query, first_key)


@settings(max_examples=40)
@given(
    layer=layers(),
    num_rows=st.integers(1, 40),
    first=st.integers(0, 39),
    block=st.sampled_from([8, 2000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_shapes_and_top_keys_of_blocks_are_those_of_rows_taken_one_by_one(
    layer: LayerSpec, num_rows: int, first: int, block: int, seed: int
) -> None:
    first = min(first, num_rows - 1)
    query = random(layer.num_heads, num_rows, SIZE, seed=seed)
    key = random(layer.num_kv_heads, num_rows, SIZE, seed=seed + 100)
    truth, share_HT = slow.attention(layer, query.numpy(), key.numpy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_shape, "BLOCK_BYTES", block)
        blocks = list(attention_blocks(query, key, layer, first))
    assert blocks[0].first_query == first
    shapes = [row_shape(one) for one in blocks]
    found = {name: torch.cat([one[name] for one in shapes], 1) for name in shapes[0]}
    tops = torch.cat([top_keys(one.weights_HQK, one, 3) for one in blocks], 1)
    assert found["entropy_nats"].shape == (layer.num_heads, num_rows - first)
    for h in range(layer.num_heads):
        for at, t in enumerate(range(first, num_rows)):
            for name, value in slow.shape(truth[h][t], t).items():
                np.testing.assert_allclose(
                    found[name][h, at], value, rtol=1e-9, atol=1e-9, err_msg=name
                )
            np.testing.assert_allclose(found["key_mass"][h, at], share_HT[h, t], rtol=1e-9)
            listed = [j for j in tops[h, at].tolist() if j >= 0]
            assert len(listed) == min(3, len(truth[h][t]))
            if layer.scale:
                assert set(listed) == slow.top(truth[h][t], 3)


@settings(max_examples=40)
@given(
    layer=layers(),
    num_rows=st.integers(2, 24),
    point=st.integers(1, 23),
    block=st.sampled_from([8, 2000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_needed_keys_are_those_of_sets_grown_key_by_key(
    layer: LayerSpec, num_rows: int, point: int, block: int, seed: int
) -> None:
    point = min(point, num_rows - 1)
    num_old = layer.entries(point)
    query = random(layer.num_heads, num_rows, SIZE, seed=seed)
    key = random(layer.num_kv_heads, num_rows, SIZE, seed=seed + 100)
    draw = np.random.default_rng(seed)
    orders = [point - num_old + draw.permutation(num_old) for _ in range(layer.num_kv_heads)]
    order_GP = torch.tensor(np.array(orders))
    truth, _ = slow.attention(layer, query.numpy(), key.numpy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_shape, "BLOCK_BYTES", block)
        counts = torch.cat(
            [needed_keys(r, order_GP, point) for r in attention_blocks(query, key, layer, point)],
            -1,
        )
    for i, percent in enumerate(MASS_PERCENT):
        for h in range(layer.num_heads):
            order = orders[h // layer.group_size].tolist()
            for at, t in enumerate(range(point, num_rows)):
                assert counts[i, h, at] == slow.needed(truth[h][t], order, point, percent)


@pytest.mark.parametrize("seen", [1, 2, 10, 20, 100, 400])
def test_a_uniform_row_has_all_keys_effective_and_no_inequality(seen: int) -> None:
    found = {name: float(column) for name, column in row_shape(uniform(seen)).items()}
    assert found["effective_keys"] == pytest.approx(seen)
    assert found["entropy_nats"] == pytest.approx(math.log(seen))
    assert found["gini"] == pytest.approx(0, abs=1e-9)
    for percent in MASS_PERCENT:
        assert found[f"keys_{percent}"] == -(-seen * percent // 100)
    assert found["top_10_mass"] == pytest.approx(math.ceil(seen / 10) / seen)
    assert found["mean_distance"] == pytest.approx((seen - 1) / 2)
    assert found["newest_32_mass"] == pytest.approx(min(32, seen) / seen)
    assert found["first_4_mass"] == pytest.approx(min(4, seen) / seen)


def uniform(seen: int) -> Rows:
    weights = torch.full((1, 1, seen), 1 / seen, dtype=torch.float64)
    return Rows(weights, torch.ones(1, seen, dtype=torch.bool), torch.ones(1, 1), seen - 1)


@pytest.mark.parametrize("at", [0, 3, 49])
def test_a_row_on_one_key_needs_one_key(at: int) -> None:
    weights = np.zeros((1, 50))
    weights[0, at] = 1
    found = {
        name: float(column) for name, column in row_shape(rows_of(weights, first_query=49)).items()
    }
    assert found["entropy_nats"] == found["entropy_frac"] == 0
    assert found["effective_keys"] == found["keys_90"] == found["keys_99"] == 1
    assert found["gini"] == pytest.approx(1 - 1 / 50)
    assert found["top_1_mass"] == 1
    assert found["first_1_mass"] == (at == 0)
    assert found["newest_1_mass"] == (at == 49)
    assert found["mean_distance"] == 49 - at


def test_a_row_of_one_key_has_no_relative_entropy() -> None:
    found = row_shape(rows_of([[1.0]]))
    assert found["entropy_frac"].isnan().all()
    assert found["gini"] == 0
    assert found["keys_95_frac"] == 1


def test_of_like_keys_the_newer_ones_are_on_top() -> None:
    rows = rows_of([[0.25, 0.25, 0.25, 0.25, 0]], first_query=10, first_key=6)
    assert sorted(top_keys(rows.weights_HQK, rows, 2)[0, 0].tolist()) == [8, 9]
    assert ranks_of(torch.tensor([0.5, 0.0, 0.5, 1e-30])).argsort(descending=True).tolist() == [
        2,
        0,
        3,
        1,
    ]


def test_rows_that_see_fewer_keys_list_fewer_and_never_an_unseen_one() -> None:
    rows = rows_of([[1.0, 0, 0], [1.0, 0, 0], [0, 0, 1.0]])
    tops = top_keys(rows.weights_HQK, rows, 4)[0]
    assert [sorted(row) for row in tops.tolist()] == [
        [-1, -1, -1, 0],
        [-1, -1, 0, 1],
        [-1, 0, 1, 2],
    ]


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 5), st.integers(0, 99))
def test_overlaps_and_half_lives_are_those_of_sets(
    heads: int, num_rows: int, k: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    tops = np.array(
        [[draw.choice(k + 4, k, replace=False) for _ in range(num_rows)] for _ in range(heads)]
    )
    sets = [[set(row) for row in head] for head in tops.tolist()]
    lags, overlap_SH = persistence(torch.tensor(tops))
    assert lags == [lag for lag in (1, 2, 4, 8, 16, 32) if lag < num_rows]
    for h in range(heads):
        curve = [slow.overlap(sets[h], lag) for lag in lags]
        np.testing.assert_allclose(overlap_SH[:, h], curve, atol=1e-12)
        expected = slow.half_life(lags, curve)
        if expected is None:
            assert half_life(lags, curve) is None
        else:
            assert half_life(lags, curve) == pytest.approx(expected, abs=1e-3)
    if heads > 1:
        overlaps = jaccard_with_others(torch.tensor(tops))
        for h in range(heads):
            for t in range(num_rows):
                pairs = [slow.jaccard(sets[h][t], sets[g][t]) for g in range(heads) if g != h]
                assert float(overlaps[h, t]) == pytest.approx(sum(pairs) / len(pairs))


def test_a_half_life_lies_on_the_line_between_two_lags() -> None:
    assert half_life([1, 2, 4], [0.9, 0.7, 0.3]) == pytest.approx(3)
    assert half_life([1], [0.0]) == pytest.approx(0.5)
    assert half_life([1, 2], [0.9, 0.6]) is None
    assert half_life([], []) is None


def test_like_lists_overlap_wholly_in_any_order_and_strangers_not_at_all() -> None:
    one = torch.tensor([[3, 1, 2], [7, 8, 9]])
    assert num_common(one, one.flip(-1)).tolist() == [3, 3]
    assert jaccard(one, one.flip(-1)).tolist() == [1.0, 1.0]
    assert jaccard(one, one + 10).tolist() == [0.0, 0.0]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 6))
def test_columns_are_cut_by_position_and_zero_where_not_given(
    start: int, length: int, first_key: int
) -> None:
    rows = rows_of([[0.1, 0.2, 0.3, 0.4]], first_query=first_key + 3, first_key=first_key)
    given = dict(zip(range(first_key, first_key + 4), (0.1, 0.2, 0.3, 0.4), strict=True))
    cut = rows.between(start, start + length)[0, 0].tolist()
    assert cut == [given.get(j, 0.0) for j in range(start, start + length)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_float32(dtype: torch.dtype) -> None:
    layer = LayerSpec(
        index=0, kind="full", num_heads=2, num_kv_heads=1, head_dim=SIZE, value_dim=SIZE
    )
    query, key = random(2, 9, SIZE, seed=0).to(dtype), random(1, 9, SIZE, seed=1).to(dtype)
    (half,) = attention_blocks(query, key, layer, 2)
    (wide,) = attention_blocks(query.float(), key.float(), layer, 2)
    assert half.weights_HQK.dtype == torch.float32
    assert torch.equal(half.weights_HQK, wide.weights_HQK)
