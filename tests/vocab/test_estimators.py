"""Each estimator against a plain, slow version of its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tests.vocab.cases import OWN, make_case
from tracekit.measure.head import Head
from tracekit.spec import HeadSpec
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous

SEEDS = st.integers(0, 10**6)
LIMITS = st.integers(1, 23)


@settings(max_examples=25, deadline=None)
@given(SEEDS, LIMITS, st.sampled_from([0.0, 1.0, 30.0]))
def test_oracle_is_the_order_of_the_true_logits(seed: int, limit: int, spread: float) -> None:
    case = make_case(seed, spread=spread)
    logits = case.logits()
    wanted = [slow.order(logits[row])[:limit] for row in case.scored_S.tolist()]
    assert case.candidates(Oracle(), limit) == wanted


@settings(max_examples=25, deadline=None)
@given(SEEDS, LIMITS)
def test_frequency_is_the_order_of_counts_without_the_own_prompt(seed: int, limit: int) -> None:
    case = make_case(seed)
    wanted = slow.frequency_ranking(case.trace, OWN, case.width)[:limit]
    assert case.candidates(Frequency(), limit) == [wanted] * len(case.scored_S)


def test_frequency_without_other_prompts_goes_by_id() -> None:
    case = make_case()
    alone = case.but(trace=tuple(pair for pair in case.trace if pair[0] == OWN))
    assert alone.candidates(Frequency(), 4)[0] == [0, 1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(SEEDS, LIMITS, st.integers(1, 30), st.sets(st.integers(0, 8), min_size=1))
def test_previous_is_the_order_of_last_use(
    seed: int, limit: int, top: int, scored: set[int]
) -> None:
    case = make_case(seed, scored=sorted(scored))
    logits = case.logits()
    ran = sorted(scored | {row - 1 for row in scored if row})
    wanted = [
        slow.previous_ranking([logits[row] for row in ran if row < step], top)[:limit]
        for step in sorted(scored)
    ]
    assert case.candidates(Previous(top=top), limit) == wanted


def test_previous_begins_with_what_the_last_position_of_the_prompt_found() -> None:
    case = make_case(scored=[5])
    (ranked,) = case.candidates(Previous(top=4), 20)
    assert ranked == slow.order(case.logits()[4])[:4]


def test_previous_has_no_candidates_where_no_head_has_run() -> None:
    assert make_case(scored=[0]).candidates(Previous(), 20) == [[]]


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 8), st.booleans())
def test_lowrank_is_the_order_of_the_truncated_product(
    seed: int, rank: int, has_bias: bool
) -> None:
    case = make_case(seed, has_bias=has_bias)
    bias_V = None if case.head.bias_V is None else case.head.bias_V.numpy()
    ranked = case.candidates(LowRank(rank=rank), case.width)
    for row, ids in zip(case.scored_S.tolist(), ranked, strict=True):
        preview_V = slow.lowrank_preview(
            case.head.weight_VE.numpy(), bias_V, case.hidden_TE[row].numpy(), rank
        )
        # Single precision may swap two previews that are closer than its rounding.
        np.testing.assert_allclose(preview_V[ids], np.sort(preview_V)[::-1], atol=1e-5)
        assert sorted(ids) == list(range(case.width))


@pytest.mark.parametrize("rank", [6, 64])
def test_lowrank_of_full_rank_is_the_oracle(rank: int) -> None:
    case = make_case(7, has_bias=True)
    assert case.candidates(LowRank(rank=rank), 10) == case.candidates(Oracle(), 10)


def test_a_scale_and_a_soft_cap_of_the_head_do_not_change_lowrank() -> None:
    case = make_case(8)
    spec = HeadSpec(num_rows=23, hidden_size=6, scale=0.5, softcap=4.0)
    capped = case.but(head=Head(case.head.weight_VE, None, spec))
    assert capped.candidates(LowRank(rank=3), 10) == case.candidates(LowRank(rank=3), 10)


def test_costs_are_those_of_the_formulas() -> None:
    spec = HeadSpec(num_rows=23, hidden_size=6, has_bias=True)
    head = Head(torch.zeros(23, 6).bfloat16(), torch.zeros(23).bfloat16(), spec)
    assert (Frequency().cost(head, 9).macs, Frequency().cost(head, 9).bytes) == (0, 0)
    assert (Previous().cost(head, 9).macs, Previous().cost(head, 9).bytes) == (0, 36)
    assert (Oracle().cost(head, 9).macs, Oracle().cost(head, 9).bytes) == (138, 322)
    lowrank = LowRank(rank=2).cost(head, 9)
    assert (lowrank.macs, lowrank.bytes) == (2 * (6 + 23), 2 * (2 * (6 + 23) + 23))
