"""The first of a row by radix sort, against Python's own stable sort; best_ids on both its ways."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tracekit.measure import logits, radix
from tracekit.measure.logits import best_ids
from tracekit.measure.radix import first_places

EDGES = (-(2**31), -(2**31) + 1, -65537, -65536, -1, 0, 1, 65535, 65536, 2**31 - 1)

SCORES = st.one_of(
    st.floats(-60, 60, width=32),
    st.integers(-2, 2).map(float),
    st.sampled_from([-0.0, 0.0, -math.inf, math.inf, 1e-45, -1e-45, 3.4e38, -3.4e38]),
)


def slow_places(row: list[int], k: int) -> list[int]:
    return sorted(range(len(row)), key=row.__getitem__)[:k]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_lowest_come_first_and_ties_by_place(data: st.DataObject) -> None:
    width, num_rows = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 3))
    numbers = st.one_of(st.integers(-(2**31), 2**31 - 1), st.sampled_from(EDGES))
    rows = [data.draw(st.lists(numbers, min_size=width, max_size=width)) for _ in range(num_rows)]
    k = data.draw(st.integers(0, width))
    found = first_places(np.array(rows, dtype=np.int32).reshape(num_rows, width), k)
    assert found.dtype == np.int64
    assert found.shape == (num_rows, k)
    assert found.tolist() == [slow_places(row, k) for row in rows]


@pytest.mark.parametrize("k", [0, 1, 7, 100, 1000, 1999, 2000])
@pytest.mark.parametrize("spread", [1, 3, 2**31 - 1])
def test_wide_rows_are_cut_without_a_loss(k: int, spread: int) -> None:
    random = np.random.default_rng(k)
    number_TV = random.integers(-spread, spread, (5, 2000)).astype(np.int32)
    found = first_places(number_TV, k)
    assert found.tolist() == [slow_places(row, k) for row in number_TV.tolist()]


def test_a_sample_that_misleads_costs_time_and_nothing_else() -> None:
    number_V = np.arange(4000, dtype=np.int32)[::-1].copy()
    number_V[:: radix.STRIDE] = -(2**31)
    mixed_TV = np.stack([number_V, np.arange(4000, dtype=np.int32)])
    assert (mixed_TV[0] <= radix._guessed_limits(mixed_TV, 500)[0]).sum() < 500
    found = first_places(mixed_TV, 500)
    assert found.tolist() == [slow_places(row, 500) for row in mixed_TV.tolist()]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_best_ids_are_the_same_by_radix_sort_by_topk_and_by_definition(data: st.DataObject) -> None:
    width, num_rows = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 3))
    rows = [data.draw(st.lists(SCORES, min_size=width, max_size=width)) for _ in range(num_rows)]
    k = data.draw(st.integers(0, 70))
    score_TV = torch.tensor(rows)
    wanted = [slow.order(row)[:k] for row in score_TV.tolist()]
    for radix_width in (1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logits, "RADIX_WIDTH", radix_width)
            patch.setattr(logits, "RADIX_THREADS", 1000)
            assert best_ids(score_TV, k).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [1, 20, 256, 8192])
def test_rows_of_a_real_width_go_both_ways_alike(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, k: int
) -> None:
    score_TV = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(k)).to(dtype)
    score_TV[1].mul_(4).round_()
    score_TV[2, 5000:] = -math.inf
    score_TV[3] = 0
    before = score_TV.clone()
    monkeypatch.setattr(logits, "RADIX_THREADS", 1000)
    sorted_TK = best_ids(score_TV, k)
    monkeypatch.setattr(logits, "RADIX_THREADS", 0)
    assert torch.equal(sorted_TK, best_ids(score_TV, k))
    assert torch.equal(score_TV, before)
