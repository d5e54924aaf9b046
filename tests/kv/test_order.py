"""Orders of float scores against Python's sort of pairs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.kv.order import LOWEST, highest, level_of, order_of

SCORES = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), float("inf"), float("-inf")])
    | st.floats(width=32, allow_nan=False),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(SCORES)
def test_levels_compare_as_the_floats_do(scores):
    levels = level_of(torch.tensor(scores)).tolist()
    for one, level in zip(scores, levels, strict=True):
        assert -(2**31) <= level < 2**31
        for other, other_level in zip(scores, levels, strict=True):
            assert (one < other) == (level < other_level)
            assert (one == other) == (level == other_level)


@settings(deadline=None)
@given(SCORES, st.data())
def test_the_highest_are_those_of_a_sort_by_score_and_then_place(scores, data):
    size = len(scores)
    is_candidate = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    counts = data.draw(st.lists(st.integers(0, size + 2), min_size=1, max_size=3))
    order = order_of(torch.tensor(scores), torch.tensor(is_candidate))
    assert ((order == LOWEST) != torch.tensor(is_candidate)).all()
    places = [x for x in range(size) if is_candidate[x]]
    best = sorted(places, key=lambda x: (scores[x], x), reverse=True)
    shape = (1, 1, 1, 1, size)
    found = highest(order.reshape(shape), torch.tensor(counts)[:, None, None, None])
    found = found.expand(len(counts), -1, -1, -1, -1)
    for n, count in enumerate(counts):
        assert found[n].flatten().nonzero()[:, 0].tolist() == sorted(best[:count])
