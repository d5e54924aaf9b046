"""Lists of top keys against sets, and counts of needed keys against sets grown key by key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_attention as slow
from tests.measure.attention_rows import SIZE, layers, random, rows_of
from tracekit.measure import attention_shape
from tracekit.measure.attention_shape import MASS_PERCENT, attention_blocks
from tracekit.measure.top_keys import (
    half_life,
    jaccard,
    jaccard_with_others,
    needed_keys,
    num_common,
    persistence,
    ranks_of,
    top_keys,
)

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec


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
