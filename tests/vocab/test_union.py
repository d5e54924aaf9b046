"""Unions: the best of each member in turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tests.vocab.cases import make_case
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous
from tracekit.vocab.scheme import parse_scheme
from tracekit.vocab.union import Union

MEMBERS = (Frequency(), Previous(top=3), LowRank(rank=2), Oracle())


@settings(max_examples=30)
@given(
    st.integers(0, 10**6),
    st.lists(st.sampled_from(MEMBERS), min_size=2, max_size=4),
    st.integers(1, 23),
)
def test_a_union_takes_the_first_of_each_then_the_second(
    seed: int, members: list[Frequency], limit: int
) -> None:
    case = make_case(seed, scored=[0, 2, 3, 7])
    ranked = [case.candidates(one, limit) for one in members]
    wanted = [slow.interleaved(rows)[:limit] for rows in zip(*ranked, strict=True)]
    assert case.candidates(Union(tuple(members)), limit) == wanted


def test_a_union_of_one_with_itself_is_that_one() -> None:
    case = make_case(1)
    twice = Union((Previous(top=3), Previous(top=3)))
    assert case.candidates(twice, 9) == case.candidates(Previous(top=3), 9)


def test_members_of_one_kind_have_memories_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case, union = make_case(2), Union((Previous(top=1), Previous(top=5)))
    whole = case.candidates(union, 23)
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", 1)
    assert case.candidates(union, 23) == whole


def test_a_union_costs_what_its_members_cost() -> None:
    case = make_case(3)
    union = case.evaluate([Union(MEMBERS)], [4, 9])
    members = [case.evaluate([one], [4, 9]) for one in MEMBERS]
    for n, cell in enumerate(union):
        for name in ("macs", "bytes"):
            assert cell[name] == pytest.approx(sum(one[n][name] for one in members))


def test_a_union_is_causal_if_all_members_are() -> None:
    assert Union((Frequency(), Previous())).causal
    assert not Union((Frequency(), Oracle())).causal


def test_the_text_of_a_union_names_its_members_and_parses_back() -> None:
    union = parse_scheme(" frequency + previous:top=3").estimator
    assert union.text == "frequency:source=all+previous:top=3"
    assert union.parts == (Frequency(), Previous(top=3))
    assert parse_scheme(union.text).estimator == union


def test_rankings_of_different_lengths_are_joined() -> None:
    case = make_case(4, scored=[0, 5])
    ids = case.candidates(Union((Previous(top=2), Frequency())), 23)
    counted = case.candidates(Frequency(), 23)[0]
    assert ids[0] == counted
    assert set(ids[1]) == set(counted) | set(case.candidates(Previous(top=2), 23)[1])
