from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.kv.amounts import Frac, Tokens
from tracekit.kv.budgets.uniform import UniformHeads
from tracekit.kv.select import Protection, select

NONE = Protection(0, Tokens(0))


def picked(score, held, budget, protection):
    template = torch.zeros(held.shape[-1], dtype=torch.bool)
    return select(score, held, budget, protection, UniformHeads(), template)


def chosen(scores, budget, protection=NONE, held=None):
    score = torch.tensor(scores, dtype=torch.float64)[None, None, None]
    here = torch.ones(score.shape, dtype=torch.bool) if held is None else torch.tensor(held)
    result = picked(score, here.reshape(score.shape), torch.tensor([[[budget]]]), protection)
    return result.kept_NLGK.flatten().nonzero().flatten().tolist(), bool(result.clipped_NLG)


def test_the_highest_scores_stay():
    assert chosen([3.0, -1.0, 2.0, -5.0, 0.0], 2) == ([0, 2], False)


def test_among_equals_the_more_recent_stays():
    assert chosen([1.0, 1.0, 1.0, 1.0], 2) == ([2, 3], False)
    assert chosen([-0.0, 0.0, -0.0], 1) == ([2], False)


def test_scores_that_differ_beyond_float32_are_equal():
    assert chosen([1.0 + 1e-12, 1.0], 1) == ([1], False)


def test_sinks_come_before_the_newest_and_both_before_any_score():
    scores = [0.0, 0.0, float("inf"), 9.0, -1.0, -1.0]
    protection = Protection(2, Tokens(2))
    assert chosen(scores, 5, protection) == ([0, 1, 2, 4, 5], False)
    assert chosen(scores, 3, protection) == ([0, 1, 5], True)
    assert chosen(scores, 1, protection) == ([0], True)


def test_a_recent_fraction_is_of_the_budget_and_rounded_down():
    scores = [9.0, 8.0, 7.0, 0.0, 0.0, 0.0]
    assert chosen(scores, 3, Protection(0, Frac(0.5))) == ([0, 1, 5], False)
    assert chosen(scores, 4, Protection(0, Frac(0.5))) == ([0, 1, 4, 5], False)


def test_new_keys_have_a_grace_period_beside_nothing_else():
    scores = [9.0, 8.0, 7.0, 0.0, 0.0, 0.0]
    assert chosen(scores, 4, Protection(grace=2)) == ([0, 1, 4, 5], False)
    assert chosen(scores, 4, Protection(recent=Tokens(1), grace=2)) == ([0, 1, 4, 5], False)
    assert chosen(scores, 4, Protection(recent=Tokens(3), grace=2)) == ([0, 3, 4, 5], False)


def test_the_template_comes_after_the_newest_and_before_any_score():
    score = torch.tensor([9.0, 0.0, 8.0, 0.0, 1.0])[None, None, None]
    template = torch.tensor([False, True, False, True, False])
    held = torch.ones(score.shape, dtype=torch.bool)
    for budget, kept in ((4, [1, 3, 4, 0]), (2, [3, 4]), (1, [4])):
        protection = Protection(recent=Tokens(1), template="kept")
        found, _ = select(
            score, held, torch.tensor([[[budget]]]), protection, UniformHeads(), template
        )
        assert found.flatten().nonzero().flatten().tolist() == sorted(kept)


def test_what_is_not_held_never_comes_back():
    assert chosen([9.0, 1.0, 2.0], 3, held=[False, True, True]) == ([1, 2], False)
    assert chosen([9.0, 1.0, 2.0], 1, Protection(1, Tokens(0)), [False, True, True])[0] == [2]


def test_protected_keys_that_are_gone_do_not_clip():
    assert chosen([0.0, 1.0, 2.0], 1, Protection(1, Tokens(1)), [False, True, True]) == (
        [2],
        False,
    )


def test_heads_have_budgets_of_their_own():
    score = torch.arange(5.0).expand(1, 1, 2, 5)
    held = torch.ones(1, 1, 2, 5, dtype=torch.bool)
    kept, _ = picked(score, held, torch.tensor([[[1, 4]]]), NONE)
    assert kept.sum(-1).tolist() == [[[1, 4]]]


@given(
    st.lists(
        st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=12
    ),
    st.integers(1, 14),
    st.integers(0, 4),
    st.integers(0, 6),
    st.data(),
)
def test_selection_equals_a_sort_by_tier_score_and_position(scores, budget, sinks, recent, data):
    size = len(scores)
    held = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    keys = [j for j in range(size) if held[j]]
    first = [j for j in keys if j < sinks]
    newest = [j for j in reversed(keys) if j >= size - recent and j not in first]
    rest = sorted(set(keys) - {*first, *newest}, key=lambda j: (scores[j], j), reverse=True)
    expected = sorted([*first, *newest, *rest][:budget])
    found = chosen(scores, budget, Protection(sinks, Tokens(recent)), held)
    assert found == (expected, len(first) + len(newest) > budget)


def test_a_negative_number_of_sinks_is_refused():
    with pytest.raises(UsageError, match="sinks=-1"):
        Protection(-1, Tokens(0))
