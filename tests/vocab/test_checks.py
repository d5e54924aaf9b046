"""Checks on single steps, against the formula; what they lead to is in the conformance suite."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tests.vocab.cases import Case, make_case, with_masked
from tracekit.errors import UsageError
from tracekit.vocab.checks.fallback import Fallback
from tracekit.vocab.controllers.fixed import Fixed
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.scheme import Scheme, parse_scheme


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 25), min_size=1, max_size=3),
    st.integers(0, 23),
    st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
)
def test_fallback_asks_for_the_head_where_the_favourite_of_the_set_is_not_clear(
    seed: int, sizes: list[int], num_pinned: int, confidence: float
) -> None:
    case = make_case(seed, num_pinned=num_pinned)
    logits, pinned = case.logits(), case.pinned_ids.tolist()
    (tried,) = case.tried([Scheme(Frequency(), Fixed(), Fallback(confidence))], sizes)
    (ranking, *_) = case.candidates(Frequency(), 23)
    for step, row in enumerate(case.scored_S.tolist()):
        for n, size in enumerate(sizes):
            inside = slow.candidate_set(ranking, pinned, size, 23)
            share = max(slow.softmax([logits[row][i] for i in inside]))
            is_unsure = size < 23 and share < confidence - 1e-9
            is_near = abs(share - confidence) < 1e-6
            assert is_near or tried.columns["is_fallback"][step, n] == is_unsure


def test_a_set_of_masked_tokens_is_never_sure() -> None:
    case = make_case(5, has_bias=True, num_pinned=0, scored=[4])
    case = with_masked(case, case.candidates(Frequency(), 3)[0])
    (tried,) = case.tried([parse_scheme("frequency@fallback:confidence=0")], [3, 4])
    assert tried.columns["is_fallback"].tolist() == [[True, False]]
    assert tried.columns["set_size"].tolist() == [[23, 4]]
    assert tried.columns["neg_log_mass_nats"][0, 0] == 0


def test_a_set_of_no_tokens_is_never_sure() -> None:
    case = make_case(scored=[0], num_pinned=0)
    (tried,) = case.tried([parse_scheme("previous@fallback:confidence=0")], [3])
    assert tried.columns["is_fallback"].all()


def costs(case: Case, text: str) -> tuple[float, float]:
    (tried,) = case.tried([parse_scheme(text)], [4])
    return tried.cost_N[0].macs, tried.cost_N[0].bytes


def test_fallback_costs_nothing_beside_the_rows_that_it_asks_for() -> None:
    case = make_case(1)
    assert costs(case, "previous@fallback") == costs(case, "previous")


@pytest.mark.parametrize("confidence", [-0.1, 1.1, math.nan])
def test_a_confidence_is_a_probability(confidence: float) -> None:
    with pytest.raises(UsageError, match="confidence is a probability from 0 to 1"):
        Fallback(confidence)
