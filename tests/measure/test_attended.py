"""What rows say of the next token against loops over keys and tokens, and against examples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_attended as slow
from tests import oracles_attention
from tests.measure.attention_rows import SIZE, layers, random, rows_of
from tracekit.measure import attention_shape
from tracekit.measure.attended import (
    TOP_TOKENS,
    anchor_overlap,
    anchors,
    attended_tokens,
    without_first_key,
)
from tracekit.measure.attention_shape import attention_blocks

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec


@settings(max_examples=60)
@given(
    layer=layers(),
    num_rows=st.integers(1, 24),
    first_row=st.integers(0, 23),
    num_ids=st.integers(1, 8),
    block=st.sampled_from([8, 2000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_every_number_of_a_row_is_that_of_loops_over_its_keys(
    layer: LayerSpec, num_rows: int, first_row: int, num_ids: int, block: int, seed: int
) -> None:
    first_row = min(first_row, num_rows - 1)
    query = random(layer.num_heads, num_rows, SIZE, seed=seed)
    key = random(layer.num_kv_heads, num_rows, SIZE, seed=seed + 100)
    ids = torch.tensor(np.random.default_rng(seed).integers(7, 7 + num_ids, num_rows + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_shape, "BLOCK_BYTES", block)
        blocks = [
            attended_tokens(without_first_key(rows), ids)
            for rows in attention_blocks(query, key, layer, first_row)
        ]
    found = {name: torch.cat([one[name] for one in blocks], 1) for name in blocks[0]}
    truth, _ = oracles_attention.attention(layer, query.numpy(), key.numpy())
    for h in range(layer.num_heads):
        for at, t in enumerate(range(first_row, num_rows)):
            expected = slow.forecast(slow.context(truth[h][t]), ids.tolist(), t)
            assert set(expected) <= set(found)
            for name, values_HR in found.items():
                value = float(values_HR[h, at])
                assert value == pytest.approx(expected.get(name, math.nan), abs=1e-9, nan_ok=True)


@settings(max_examples=40)
@given(
    layer=layers(),
    num_rows=st.integers(1, 24),
    k=st.integers(1, 5),
    lag=st.integers(1, 5),
    block=st.sampled_from([8, 2000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_anchors_and_their_overlaps_are_those_of_sets(
    layer: LayerSpec, num_rows: int, k: int, lag: int, block: int, seed: int
) -> None:
    query = random(layer.num_heads, num_rows, SIZE, seed=seed)
    key = random(layer.num_kv_heads, num_rows, SIZE, seed=seed + 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_shape, "BLOCK_BYTES", block)
        rows = attention_blocks(query, key, layer, 0)
        top_Rk = torch.cat([anchors(without_first_key(one), k) for one in rows])
    truth, _ = oracles_attention.attention(layer, query.numpy(), key.numpy())
    sets = [slow.anchors([head[t] for head in truth], k) for t in range(num_rows)]
    overlap_R = anchor_overlap(top_Rk, lag)
    assert len(overlap_R) == num_rows
    for t, own in enumerate(sets):
        assert set(top_Rk[t].tolist()) == (own or {-1})
        before = sets[t - lag] if t >= lag else None
        expected = math.nan if own is None or before is None else slow.overlap(own, before)
        assert float(overlap_R[t]) == pytest.approx(expected, nan_ok=True)


def test_positions_of_one_token_are_added_and_equal_tokens_go_before() -> None:
    # The first key takes half; tokens 5 and 6 share what is left, 7 is behind them.
    rows = rows_of([[0.5, 0.1, 0.2, 0.1, 0.1]], first_query=4)
    ids = torch.tensor([9, 5, 6, 5, 7, 5])
    found = {name: float(one[0, 0]) for name, one in _told(rows, ids).items()}
    assert found["next_mass"] == pytest.approx(0.4)
    assert found["chance_mass"] == 0.5
    assert found["distinct_tokens"] == 3
    assert (found["rank"], found["reciprocal_rank"]) == (2, 0.5)
    assert (found["top_1_hit"], found["top_8_hit"], found["top_8_hit_all"]) == (0, 1, 1)


def test_a_token_that_stands_at_the_first_key_alone_is_not_copied() -> None:
    rows = rows_of([[0.5, 0.25, 0.25]], first_query=2)
    found = _told(rows, torch.tensor([9, 5, 6, 9]))
    assert float(found["copied_frac"]) == 0
    assert float(found["top_64_hit_all"]) == 0
    for name in ("next_mass", "chance_mass", "rank", "reciprocal_rank", "top_64_hit"):
        assert found[name].isnan().all()


def test_what_followed_the_token_last_time_is_found_after_the_first_key_too() -> None:
    # Token 4 stood at positions 0 and 2: 5 and 6 followed it.
    rows = rows_of([[0.2, 0.4, 0.1, 0.2, 0.1]], first_query=4)
    found = _told(rows, torch.tensor([4, 5, 4, 6, 4, 6]))
    assert float(found["induction_mass"]) == pytest.approx(0.6 / 0.8)
    assert float(found["induction_chance"]) == 0.5
    assert float(found["induction_hit"]) == 1
    assert float(_told(rows, torch.tensor([4, 5, 4, 6, 4, 7]))["induction_hit"]) == 0


def test_a_row_with_nothing_but_the_first_key_foretells_nothing() -> None:
    for rows in (rows_of([[1.0]]), rows_of([[1.0, 0.0]], first_query=1)):
        scaled = without_first_key(rows)
        assert (scaled.weights_HQK == 0).all()
        found = _told(rows, torch.tensor([3, 4, 5]))
        assert float(found["copied_frac"]) == 0
        assert not found["distinct_tokens"].isnan().any()


def test_rows_far_from_the_first_key_keep_all_that_they_see() -> None:
    rows = rows_of([[0.5, 0.25, 0.25]], first_query=8, first_key=6)
    scaled = without_first_key(rows)
    assert torch.equal(scaled.weights_HQK, rows.weights_HQK)
    assert scaled.first_key == 6


def test_hits_are_counted_for_each_number_of_tokens() -> None:
    found = _told(rows_of([[0.5, 0.5]], first_query=1), torch.tensor([3, 4, 4]))
    assert {f"top_{k}_hit" for k in TOP_TOKENS} < set(found)
    assert all(float(found[f"top_{k}_hit"]) == 1 for k in TOP_TOKENS)


def _told(rows: attention_shape.Rows, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return attended_tokens(without_first_key(rows), ids)
