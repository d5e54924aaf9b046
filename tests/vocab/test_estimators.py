"""Each estimator against a plain, slow version of its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tests.vocab.cases import make_case
from tracekit.measure.head import Head
from tracekit.spec import HeadSpec
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous
from tracekit.vocab.estimators.random import Random

SEEDS = st.integers(0, 10**6)
LIMITS = st.integers(1, 23)


@settings(max_examples=25)
@given(SEEDS, LIMITS, st.sampled_from([0.0, 1.0, 30.0]))
def test_oracle_is_the_order_of_the_true_logits(seed: int, limit: int, spread: float) -> None:
    case = make_case(seed, spread=spread)
    logits = case.logits()
    wanted = [slow.order(logits[row])[:limit] for row in case.scored_S.tolist()]
    assert case.candidates(Oracle(), limit) == wanted


@settings(max_examples=25)
@given(SEEDS, LIMITS, st.sampled_from(["all", "given", "generated", "domain"]))
def test_frequency_is_the_order_of_counts_without_the_own_prompt(
    seed: int, limit: int, source: Any
) -> None:
    case = make_case(seed)
    case = case.but(rest=(case.rest[0].but(domain="elsewhere"), case.rest[1]))
    everything, counted = [], []
    for one in case.rest:
        ids = one.token_ids_T.tolist()
        everything += ids
        # In these cases the second half of a text is the model's own.
        middle = len(ids) // 2 + 1
        same = ids if one.domain == case.own.domain else []
        parts = {"all": ids, "given": ids[:middle], "generated": ids[middle:], "domain": same}
        counted += parts[source]
    wanted = slow.frequency_ranking(counted, everything, case.width)[:limit]
    found = case.candidates(Frequency(source=source), limit)
    assert found == [wanted] * len(case.scored_S)


@pytest.mark.parametrize("source", ["all", "given", "generated", "domain"])
def test_frequency_ends_where_the_counts_end(source: Any) -> None:
    case = make_case()
    rest = tuple(
        one.but(token_ids_T=one.token_ids_T.where(one.token_ids_T % 2 == 1, 7)) for one in case.rest
    )
    seen = {int(i) for one in rest for i in one.token_ids_T}
    for ids in case.but(rest=rest).candidates(Frequency(source=source), 23):
        assert ids[0] == 7
        assert set(ids) == seen
    assert case.but(rest=()).candidates(Frequency(source=source), 4) == [[]] * len(case.scored_S)


@settings(max_examples=25)
@given(SEEDS, LIMITS, st.integers(0, 5))
def test_random_is_a_stretch_of_one_order_from_another_place_at_each_step(
    seed: int, limit: int, number: int
) -> None:
    case = make_case(seed, num_rows=9, scored=list(range(9)))
    whole = case.candidates(Random(seed=number), 23)
    first = whole[0]
    for row, ids in enumerate(whole):
        start = int(row * 0.6180339887498949 % 1 * 23)
        assert ids == [first[(start + place) % 23] for place in range(23)]
    assert case.candidates(Random(seed=number), limit) == [ids[:limit] for ids in whole]


def test_random_is_no_order_of_the_case_and_another_with_each_seed() -> None:
    orders = [make_case(seed).candidates(Random(seed=1), 23) for seed in (1, 2)]
    assert orders[0] == orders[1]
    assert make_case(1).candidates(Random(seed=2), 23) != orders[0]


@settings(max_examples=40)
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


@settings(max_examples=25)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_are_those_of_the_formulas(dtype: torch.dtype) -> None:
    case = make_case(has_bias=True)
    assert case.head.bias_V is not None
    head = Head(case.head.weight_VE.to(dtype), case.head.bias_V.to(dtype), case.head.spec)
    estimators = [Frequency(), Random(), Previous(), LowRank(rank=2), LowRank(rank=64), Oracle()]
    cells = case.but(head=head).evaluate(estimators, [9])
    # V = 23 rows of E = 6 numbers and a bias.
    wanted = [
        (0, 0),
        (0, 0),
        (0, 9 * 4),
        (2 * (6 + 23), dtype.itemsize * (2 * (6 + 23) + 23)),
        (6 * (6 + 23), dtype.itemsize * (6 * (6 + 23) + 23)),
        (23 * 6, dtype.itemsize * 23 * 7),
    ]
    for cell, (macs, num_bytes) in zip(cells, wanted, strict=True):
        assert cell["macs"] == pytest.approx(macs)
        assert cell["bytes"] == pytest.approx(num_bytes)
