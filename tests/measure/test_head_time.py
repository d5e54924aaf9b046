"""What is timed: sizes, batches, sets and products. The times themselves are free."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.measure import head_time
from tracekit.measure.head import Head
from tracekit.measure.head_time import time_gather
from tracekit.spec import HeadSpec

WIDTH, HIDDEN = 60, 8


def small_head(*, has_bias: bool = False, dtype: torch.dtype = torch.float32) -> Head:
    generator = torch.Generator().manual_seed(0)
    weight_VE = torch.randn(WIDTH, HIDDEN, generator=generator).to(dtype)
    bias_V = torch.randn(WIDTH, generator=generator).to(dtype) if has_bias else None
    spec = HeadSpec(num_rows=WIDTH, hidden_size=HIDDEN, has_bias=has_bias)
    return Head(weight_VE, bias_V, spec)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_there_is_a_row_a_batch_and_size_with_positive_times(dtype: str, has_bias: bool) -> None:
    head = small_head(has_bias=has_bias, dtype=getattr(torch, dtype))
    found = time_gather(head, [4, 20], batches=(1, 3), repeats=2)
    assert [(one.batch, one.size) for one in found] == [(1, 4), (1, 20), (3, 4), (3, 20)]
    for one in found:
        for name, value in asdict(one).items():
            if name.endswith("_s") and "spread" not in name:
                assert 0 < value < math.inf, name
        assert one.spread_s >= 0
        assert one.full_spread_s >= 0
        assert (one.rounds, one.dtype, one.threads) == (2, dtype, torch.get_num_threads())


def test_sizes_above_the_vocabulary_are_the_vocabulary_and_timed_once() -> None:
    found = time_gather(small_head(), [WIDTH, 5, WIDTH + 1, 10**6], batches=(1, 2), repeats=1)
    assert [(one.batch, one.size) for one in found] == [(1, WIDTH), (1, 5), (2, WIDTH), (2, 5)]
    assert found[0].gathered_rows == found[2].gathered_rows == WIDTH


def test_the_whole_head_is_timed_once_a_batch_and_shared_by_its_sizes() -> None:
    found = time_gather(small_head(), [1, 2, 3], batches=(1, 4), repeats=3)
    assert len({one.full_s for one in found if one.batch == 1}) == 1
    assert len({one.full_s for one in found if one.batch == 4}) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, WIDTH), st.integers(1, 9), st.integers(0, 2**32))
def test_the_rows_gathered_are_the_union_of_distinct_sets(size: int, batch: int, seed: int) -> None:
    bench = head_time._Bench(small_head(), [size], [batch], seed)
    ids_X = bench._union(batch, size)
    random = np.random.default_rng(seed)
    random.standard_normal((batch, HIDDEN), dtype=np.float32)
    sets = [set(random.choice(WIDTH, size, replace=False, shuffle=False)) for _ in range(batch)]
    assert all(len(one) == size for one in sets)
    assert ids_X.tolist() == sorted(set().union(*sets))
    assert size <= len(ids_X) <= min(WIDTH, size * batch)


def test_gathered_products_are_the_logits_of_the_gathered_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Tensor] = []
    linear = torch.nn.functional.linear

    def watched(
        hidden_BE: torch.Tensor, rows_XE: torch.Tensor, bias_X: torch.Tensor | None
    ) -> torch.Tensor:
        seen.append(linear(hidden_BE, rows_XE, bias_X))
        return seen[-1]

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    bench = head_time._Bench(small_head(has_bias=True), [7], [3], seed=5)
    bench.round()
    full_BV, gathered_BX, contiguous_BK = seen
    ids_X = head_time._Bench(small_head(has_bias=True), [7], [3], seed=5)._union(3, 7)
    torch.testing.assert_close(gathered_BX, full_BV[:, ids_X])
    starts = range(WIDTH - 7 + 1)
    assert any(torch.allclose(contiguous_BK, full_BV[:, at : at + 7]) for at in starts)


def test_sets_differ_from_round_to_round() -> None:
    bench = head_time._Bench(small_head(), [5], [1], seed=0)
    assert bench._union(1, 5).tolist() != bench._union(1, 5).tolist()


def test_no_further_round_begins_when_the_time_is_spent() -> None:
    assert time_gather(small_head(), [4], repeats=50, budget_s=0)[0].rounds == head_time.MIN_ROUNDS
    assert time_gather(small_head(), [4], repeats=5, budget_s=60)[0].rounds == 5


def test_timing_leaves_the_head_alone() -> None:
    head = small_head(has_bias=True)
    time_gather(head, [3, WIDTH], repeats=1)
    assert torch.equal(head.weight_VE, small_head(has_bias=True).weight_VE)


@pytest.mark.parametrize(
    ("sizes", "batches", "repeats", "words"),
    [
        ([], (1,), 1, r"sizes to be timed are \[\]"),
        ([4, 0], (1,), 1, r"sizes to be timed are \[4, 0\]"),
        ([4], (), 1, r"batches to be timed are \[\]"),
        ([4], (1, -2), 1, r"batches to be timed are \[1, -2\]"),
        ([4], (1,), 0, r"repeats to be timed are \[0\]"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_sentence(
    sizes: list[int], batches: tuple[int, ...], repeats: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        time_gather(small_head(), sizes, batches=batches, repeats=repeats)


def test_a_head_elsewhere_than_in_main_memory_is_refused() -> None:
    head = Head(torch.empty(WIDTH, HIDDEN, device="meta"), None, small_head().spec)
    with pytest.raises(UsageError, match="on meta: give one in main memory"):
        time_gather(head, [4])
