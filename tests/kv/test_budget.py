from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_budgets
from tracekit.kv.allotment import Allotment, share_out
from tracekit.kv.amounts import parse_kept
from tracekit.kv.budget import Cache
from tracekit.kv.fill import fill, whole
from tracekit.spec import LayerSpec


def make_layer(index=0, heads=2, size=4, value=4, window=None):
    return LayerSpec(
        index=index,
        kind="sliding" if window else "full",
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size,
        value_dim=value,
        window=window,
    )


@st.composite
def layers(draw, sizes=(1, 2, 3, 4)):
    """Layers of unequal heads, entry sizes and windows."""
    return tuple(
        make_layer(
            index,
            draw(st.integers(1, 3)),
            draw(st.sampled_from(sizes)),
            draw(st.sampled_from(sizes)),
            draw(st.none() | st.integers(1, 20)),
        )
        for index in range(draw(st.integers(1, 5)))
    )


SHARES = st.sampled_from([0.0, 0.0, 1e-30, 0.1, 1 / 3, 1.0, 1.0, 2.0, 7.3, 1e6]) | st.floats(0, 10)


def draw_shares(data, specs):
    return [
        torch.tensor(data.draw(st.lists(SHARES, min_size=n, max_size=n)), dtype=torch.float64)
        for n in (one.num_kv_heads for one in specs)
    ]


@settings(max_examples=300, deadline=None)
@given(layers(), st.integers(1, 60), st.integers(1, 40), st.data())
def test_shared_out_entries_equal_those_of_the_slow_twin(specs, budget, num_tokens, data):
    shares = draw_shares(data, specs)
    found = share_out(shares, budget, num_tokens, Cache(specs))
    slow = [row.tolist() for row in shares]
    assert [row.tolist() for row in found] == oracles_budgets.share_out(
        slow, budget, specs, num_tokens
    )


@settings(max_examples=300, deadline=None)
@given(layers(), st.integers(1, 60), st.integers(1, 10_000), st.data())
def test_the_bytes_are_those_of_uniform_to_less_than_one_entry(specs, budget, num_tokens, data):
    cache = Cache(specs)
    found = share_out(draw_shares(data, specs), budget, num_tokens, cache)
    for entries, one in zip(found, specs, strict=True):
        assert entries.min() >= 1
        assert entries.max() <= one.entries(num_tokens)
    count_X = torch.cat(found).numpy()
    left = cache.num_bytes(budget, num_tokens) - int(cache.size_X @ count_X)
    can_grow_X = count_X < cache.most_X(num_tokens)
    assert 0 <= left < min(cache.size_X[can_grow_X], default=1)


@settings(max_examples=100, deadline=None)
@given(layers(sizes=(8,)), st.integers(1, 60), st.integers(1, 10_000), st.data())
def test_the_bytes_are_exact_where_all_entries_weigh_the_same(specs, budget, num_tokens, data):
    cache = Cache(specs)
    found = share_out(draw_shares(data, specs), budget, num_tokens, cache)
    assert int(torch.cat(found).sum()) * cache.size_X[0] == cache.num_bytes(budget, num_tokens)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 6), st.floats(0.1, 500))
def test_a_level_gives_each_head_its_share_between_its_bounds(data, num_heads, total):
    def some(values):
        return np.array(data.draw(st.lists(values, min_size=num_heads, max_size=num_heads)))

    low_X, size_X = some(st.integers(1, 9)), some(st.integers(1, 4))
    high_X, share_X = low_X + some(st.integers(0, 30)), some(st.floats(0.01, 10))
    columns = (array.tolist() for array in (share_X, low_X, high_X, size_X))
    found, slow = fill(share_X, low_X, high_X, size_X, total), oracles_budgets.fill(*columns, total)
    np.testing.assert_allclose(found, slow, rtol=1e-9)
    wanted = min(max(total, size_X @ low_X), size_X @ high_X)
    np.testing.assert_allclose(size_X @ found, wanted, rtol=1e-9)


def test_whole_shares_of_the_right_sum_are_given_as_they_are():
    cache = Cache((make_layer(0), make_layer(1), make_layer(2)))
    shares = [torch.tensor(row) for row in ([9.0, 1.0], [5.0, 5.0], [3.0, 7.0])]
    found = share_out(shares, 5, 10, cache)
    assert [row.tolist() for row in found] == [[9, 1], [5, 5], [3, 7]]


def test_the_first_of_equal_remainders_is_rounded_up():
    assert whole(np.full(3, 5 / 3), np.full(3, 9), np.ones(3, int), 5).tolist() == [2, 2, 1]


def test_heads_of_share_zero_keep_one_entry_until_the_others_are_full():
    cache = Cache((make_layer(0),))
    share = torch.tensor([1.0, 0.0])
    entries = [share_out([share], budget, 10, cache)[0].tolist() for budget in (1, 4, 6, 10)]
    assert entries == [[1, 1], [7, 1], [10, 2], [10, 10]]


def test_what_a_sliding_layer_cannot_hold_is_not_given_to_others():
    specs = (make_layer(0), make_layer(1, window=4))
    shares = [torch.ones(2), torch.ones(2)]
    found = share_out(shares, 10, 20, Cache(specs))
    assert [row.tolist() for row in found] == [[10, 10], [4, 4]]
    # A plan may move entries into the full layer, of the same bytes.
    found = share_out([torch.tensor([3.0, 3.0]), torch.ones(2)], 10, 20, Cache(specs))
    assert [row.tolist() for row in found] == [[11, 11], [3, 3]]


def test_bytes_are_the_most_entries_a_head_that_fit():
    cache = Cache((make_layer(0), make_layer(1, window=4)))
    # An entry of all heads is 32 bytes in each layer.
    assert [cache.tokens(parse_kept(text), 20) for text in ("1B", "64B", "127B", "128B")] == [
        1, 1, 1, 2,
    ]  # fmt: skip
    assert cache.tokens(parse_kept("288B"), 20) == 5
    assert cache.share(parse_kept("288B"), 20) == 0.25
    assert cache.tokens(parse_kept("1MiB"), 20) == 20


@given(layers(), st.integers(1, 5_000), st.integers(1, 40))
def test_no_more_entries_would_fit_into_the_bytes(specs, num_bytes, num_tokens):
    cache = Cache(specs)
    found = cache.tokens(parse_kept(f"{num_bytes}B"), num_tokens)
    fits = [n for n in range(1, num_tokens + 1) if cache.num_bytes(n, num_tokens) <= num_bytes]
    assert found == max(fits, default=1)


def test_an_allotment_gives_the_layers_asked_for_in_their_order():
    cache = Cache(tuple(make_layer(index) for index in (2, 5, 6)))
    shares = [torch.full((2,), float(wanted)) for wanted in (6, 4, 2)]
    allotment = Allotment(cache, [parse_kept("4tok"), parse_kept("0.4")], [shares, shares])
    assert allotment.entries(10, [6, 2]).tolist() == [[[2, 2], [6, 6]]] * 2
    even = Allotment(cache, [parse_kept("4tok")])
    assert even.entries(10, [6, 2]).tolist() == [[[4, 4], [4, 4]]]


@pytest.mark.parametrize("num_tokens", [10, 1000])
def test_shares_keep_their_proportions_as_the_text_grows(num_tokens):
    cache = Cache((make_layer(0), make_layer(1)))
    budget = num_tokens * 3 // 10
    found = share_out([torch.full((2,), 5.0), torch.ones(2)], budget, num_tokens, cache)
    assert [row.tolist() for row in found] == [[budget * 5 // 3] * 2, [budget // 3] * 2]
