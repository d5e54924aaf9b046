"""Prompt lookup, against a search of the whole text at each step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_ngram as slow
from tests.vocab.cases import Case, make_case
from tracekit.errors import UsageError
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.estimators.lookup import Lookup

NUM_ROWS = 40


def text_case(ids: list[int], scored: list[int] | None = None) -> Case:
    """Return a case whose own text is given; its last token is never read."""
    rows = list(range(len(ids) - 1)) if scored is None else scored
    case = make_case(num_rows=len(ids) - 1, scored=rows, width=8, num_pinned=1)
    return case.but(own=case.own.but(token_ids_T=torch.tensor(ids)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=NUM_ROWS + 1, max_size=NUM_ROWS + 1),
    st.integers(1, 6),
    st.integers(1, 8),
    st.sets(st.integers(0, NUM_ROWS - 1), min_size=1),
)
def test_lookup_is_the_order_of_a_search_of_the_whole_text(
    ids: list[int], longest: int, limit: int, scored: set[int]
) -> None:
    case = text_case(ids, sorted(scored))
    wanted = [
        slow.lookup_ranking(ids[: row + 1], longest)[:limit] for row in case.scored_S.tolist()
    ]
    assert case.candidates(Lookup(longest=longest), limit) == wanted


def test_the_longest_match_comes_first_then_the_most_recent_follower() -> None:
    # Behind 1 2 stood 3; behind 2 alone 4, 5 and last 6.
    *_, ranked = text_case([1, 2, 3, 2, 4, 2, 5, 2, 6, 1, 2, 0]).candidates(Lookup(), 8)
    assert ranked == [3, 6, 5, 4]


def test_a_token_that_is_new_to_the_text_has_no_followers() -> None:
    assert text_case([1, 2, 3, 4, 5]).candidates(Lookup(), 8) == [[], [], [], []]


def test_blocks_of_steps_change_no_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = text_case([1, 2, 1, 2, 3, 1, 2, 1, 3, 1, 2, 1])
    whole = case.candidates(Lookup(), 8)
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", 1)
    assert case.candidates(Lookup(), 8) == whole


def test_a_lookup_reads_ids_and_multiplies_nothing() -> None:
    (tried,) = text_case([1, 2, 1, 2, 3]).evaluate([Lookup(longest=2)], [3])
    assert (tried["macs"], tried["bytes"]) == (0, 4 * (2 * (1 + 2) + 3))


def test_a_suffix_of_no_token_is_refused() -> None:
    with pytest.raises(UsageError, match="longest must be at least 1"):
        Lookup(longest=0)
