"""Packed keys against lists from which what is not held was taken out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.kv.packed import cache_order, pooled

HELD = st.lists(st.booleans(), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.lists(HELD, min_size=1, max_size=3))
def test_held_keys_come_first_in_order_and_then_the_others(rows):
    length = min(map(len, rows))
    held = torch.tensor([row[:length] for row in rows])
    for order, row in zip(cache_order(held).tolist(), held.tolist(), strict=True):
        places = range(length)
        assert order == [k for k in places if row[k]] + [k for k in places if not row[k]]


@pytest.mark.parametrize("pool", ["avg", "max"])
@settings(deadline=None)
@given(held=HELD, kernel=st.sampled_from([1, 3, 5]), seed=st.integers(0, 99))
def test_a_key_is_smoothed_over_its_neighbours_in_the_cache(pool, held, kernel, seed):
    score = np.random.default_rng(seed).random(len(held)).tolist()
    found = pooled(torch.tensor([score]), torch.tensor([held]), kernel, pool)[0].tolist()
    line = [score[k] for k in range(len(held)) if held[k]]
    for place, key in enumerate([k for k in range(len(held)) if held[k]]):
        near = line[max(0, place - kernel // 2) : place + kernel // 2 + 1]
        assert found[key] == pytest.approx(max(near) if pool == "max" else sum(near) / kernel)


def test_what_a_key_that_is_not_held_scores_does_not_matter():
    held = torch.tensor([True, False, True])
    found = pooled(torch.tensor([[1.0, torch.nan, 3.0]]), held[None], 3, "avg")[0]
    assert found[held].tolist() == pytest.approx([4 / 3, 4 / 3])
