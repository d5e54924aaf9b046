"""Attention statistics against loops over rows and keys, and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_attention as slow
from tests.measure.attention_rows import SIZE, layers, random, rows_of
from tracekit.measure import attention_shape
from tracekit.measure.attention_shape import (
    MASS_PERCENT,
    TOP_PERCENT,
    Rows,
    attention_blocks,
    distance_mass,
    num_distances,
    row_shape,
)
from tracekit.measure.top_keys import top_keys
from tracekit.spec import LayerSpec


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
    num_bins = num_distances(num_rows, layer.window)
    distances_HQB = torch.cat([distance_mass(one, num_bins) for one in blocks], 1)
    np.testing.assert_allclose(distances_HQB.sum(-1) + found["first_1_mass"], 1, rtol=1e-13)
    assert found["entropy_nats"].shape == (layer.num_heads, num_rows - first)
    for h in range(layer.num_heads):
        for at, t in enumerate(range(first, num_rows)):
            for name, value in slow.shape(truth[h][t], t).items():
                np.testing.assert_allclose(
                    found[name][h, at], value, rtol=1e-9, atol=1e-9, err_msg=name
                )
            mass = slow.by_distance(truth[h][t], t, num_rows, layer.window)
            np.testing.assert_allclose(distances_HQB[h, at], mass, rtol=1e-9, atol=1e-14)
            np.testing.assert_allclose(found["key_mass"][h, at], share_HT[h, t], rtol=1e-9)
            listed = [j for j in tops[h, at].tolist() if j >= 0]
            assert len(listed) == min(3, len(truth[h][t]))
            if layer.scale:
                assert set(listed) == slow.top(truth[h][t], 3)


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


@pytest.mark.parametrize("seen", [19, 20, 21, 99, 100, 101, 200, 201, 400, 401])
def test_a_share_of_the_keys_is_rounded_up_to_whole_keys(seen: int) -> None:
    found = row_shape(uniform(seen))
    for percent in TOP_PERCENT:
        keys = next(n for n in range(seen + 1) if 100 * n >= percent * seen)
        assert float(found[f"top_{percent}_mass"]) == pytest.approx(keys / seen)


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


def test_distance_bins_double_and_leave_out_the_first_key() -> None:
    (mass,) = distance_mass(uniform(10), num_distances(10, None))[0].tolist()
    # Keys 9; 8; 7, 6; 5, 4, 3, 2; 1.
    assert mass == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.1])


@pytest.mark.parametrize(
    ("num_tokens", "window", "bins"),
    [(1, None, 1), (2, None, 2), (3, None, 3), (4, None, 3), (5, None, 4), (99, 1, 1), (99, 5, 4)],
)
def test_there_are_as_many_bins_as_the_farthest_key_needs(
    num_tokens: int, window: int | None, bins: int
) -> None:
    assert num_distances(num_tokens, window) == bins


def test_a_window_that_has_passed_the_first_key_has_all_mass_in_the_bins() -> None:
    rows = rows_of([[0.5, 0.2, 0.3]], first_query=9, first_key=7)
    (mass,) = distance_mass(rows, num_distances(10, 3))[0].tolist()
    assert mass == pytest.approx([0.3, 0.2, 0.5])
    assert float(row_shape(rows)["first_1_mass"]) == 0


def test_a_first_key_that_has_almost_everything_rounds_nothing_away() -> None:
    rows = rows_of([[1.0, 1e-30, 3e-30, 1e-30]], first_query=3)
    (mass,) = distance_mass(rows, num_distances(4, None))[0].tolist()
    assert mass == pytest.approx([1e-30, 3e-30, 1e-30], rel=1e-12)


def test_a_row_of_one_key_has_no_relative_entropy() -> None:
    found = row_shape(rows_of([[1.0]]))
    assert found["entropy_frac"].isnan().all()
    assert found["gini"] == 0
    assert found["keys_95_frac"] == 1


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
