"""N-grams of other prompts, against counts by search."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_ngram as slow
from tests.vocab.cases import Case, make_case
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.ngram import Ngram
from tracekit.vocab.scheme import parse_scheme

WIDTH = 7
TEXT = st.lists(st.integers(0, 3), min_size=2, max_size=25)


def text_case(own: list[int], others: list[list[int]]) -> Case:
    """Return a case of given texts, each step of the own one scored."""
    case = make_case(num_rows=len(own) - 1, scored=list(range(len(own) - 1)), width=WIDTH)
    rest = zip(case.rest, others, strict=False)
    return case.but(
        own=case.own.but(token_ids_T=torch.tensor(own)),
        rest=tuple(one.but(token_ids_T=torch.tensor(ids)) for one, ids in rest),
    )


@settings(max_examples=40, deadline=None)
@given(TEXT, TEXT, TEXT, st.integers(1, 5), st.integers(1, WIDTH))
def test_ngram_is_the_order_of_scores_counted_by_search(
    own: list[int], first: list[int], second: list[int], longest: int, limit: int
) -> None:
    case = text_case(own, [first, second])
    wanted = [
        slow.ngram_ranking(own[: row + 1], [first, second], longest, WIDTH)[:limit]
        for row in case.scored_S.tolist()
    ]
    assert case.candidates(Ngram(longest=longest), limit) == wanted


def test_a_frequent_follower_of_a_shorter_suffix_passes_a_rare_one_of_a_longer() -> None:
    # Behind 1 2: 3, 4, 5, 6 once each. Behind 2 alone: 0 twenty times of 24, times 0.4.
    other = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, *([0, 2] * 20), 0]
    ranked = text_case([1, 2, 0], [other]).candidates(Ngram(longest=2), WIDTH)[1]
    assert ranked[0] == 0
    assert ranked[1:5] == [3, 4, 5, 6]
    assert sorted(ranked) == list(range(WIDTH))


def test_no_match_runs_over_the_end_of_a_text() -> None:
    (ranked,) = text_case([1, 0], [[5, 1], [4, 4, 4]]).candidates(Ngram(), WIDTH)
    assert ranked == [4, 1, 5]


def test_the_own_text_is_not_counted() -> None:
    ranked = text_case([1, 2, 1, 2, 1, 0], [[3, 3]]).candidates(Ngram(), WIDTH)
    assert ranked[-1] == [3]


def test_without_other_texts_there_are_no_candidates_but_the_pinned() -> None:
    case = text_case([1, 2, 3], [])
    assert case.candidates(Ngram(), 4) == [[], []]
    for estimator in (Ngram(), Frequency(), parse_scheme("ngram+frequency").estimator):
        (cell,) = case.evaluate([estimator], [4])
        assert cell["set_size"] == len(case.pinned_ids)


def test_what_is_read_are_ids_and_the_counts_of_all_followers() -> None:
    # One step: 1 is followed by two tokens, elsewhere by nothing.
    small, large = text_case([1, 0], [[1, 2, 1, 3, 5]]).evaluate([Ngram(longest=2)], [3, 6])
    assert (small["macs"], small["bytes"]) == (0, 4 * (1 + 2 + 3) + 8 * 2)
    # No more than the four tokens that came have a place.
    assert (large["macs"], large["bytes"]) == (0, 4 * (1 + 2 + 4) + 8 * 2)
