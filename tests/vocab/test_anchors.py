"""Attention anchors against the definition, and what they count as their cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_nearest as slow
from tests.vocab.cases import NUM_HEADS, NUM_LAYERS, make_case
from tracekit.vocab.estimator import parse_estimator
from tracekit.vocab.estimators.anchors import Anchors
from tracekit.vocab.layers import LayerChoice

if TYPE_CHECKING:
    from tests.vocab.cases import Case

OFS = ["output", "input", "hidden", "past"]


def wanted_scores(case: Case, one: Anchors, row: int) -> list[float] | None:
    """Return the scores of all tokens at a row, by loops."""
    layers = one.layers.numbers(NUM_LAYERS)
    attention = [
        sum(
            float(case.own.attention_LHTT[layer, head, row, i])
            for layer in layers
            for head in range(NUM_HEADS)
        )
        for i in range(row + 1 - (one.of == "past"))
    ]
    rows_VE = case.embedding_VE if one.of == "input" else case.head.weight_VE
    states_TE = case.hidden_TE if one.of in ("hidden", "past") else rows_VE[case.token_ids_T]
    return slow.anchors(
        attention,
        states_TE.tolist(),
        rows_VE.tolist(),
        top=one.top,
        power=one.power,
        is_cosine=one.metric == "cosine",
    )


def without_attention(case: Case, key: int) -> Case:
    """Return the case with no attention to one position."""
    attention_LHTT = case.own.attention_LHTT.clone()
    attention_LHTT[..., key] = 0
    return case.but(own=case.own.but(attention_LHTT=attention_LHTT))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 23),
    st.sampled_from(OFS),
    st.sampled_from(["all", "1", "0-1", "last1"]),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.sampled_from(["dot", "cosine"]),
)
def test_anchors_are_the_order_of_products_with_what_attention_pools(
    seed: int, limit: int, of: Any, layers: str, top: int, power: float, metric: Any
) -> None:
    case = without_attention(make_case(seed, scored=[0, 1, 4, 8]), key=3)
    one = Anchors(of=of, layers=LayerChoice.parse(layers), top=top, power=power, metric=metric)
    ranked = case.candidates(one, limit)
    for row, ids in zip(case.scored_S.tolist(), ranked, strict=True):
        scores = wanted_scores(case, one, row)
        if scores is None:
            assert ids == []
        else:
            assert len(ids) == limit
            assert slow.is_order_of(ids, scores, 1e-5)


@pytest.mark.parametrize("of", OFS)
def test_the_first_position_is_no_anchor(of: Any) -> None:
    one = Anchors(of=of, top=100)
    case = make_case(2)
    ids_T, hidden_TE = case.token_ids_T.clone(), case.hidden_TE.clone()
    ids_T[0] = (ids_T[0] + 1) % case.width
    hidden_TE[0] *= -5
    other = case.but(own=case.own.but(token_ids_T=ids_T, hidden_TE=hidden_TE))
    assert other.candidates(one, 23) == case.candidates(one, 23)


def test_the_first_step_has_no_anchors_and_the_second_none_of_the_past() -> None:
    case = make_case(scored=[0, 1])
    assert [len(ids) for ids in case.candidates(Anchors(), 23)] == [0, 23]
    assert [len(ids) for ids in case.candidates(Anchors(of="past"), 23)] == [0, 0]


def test_a_step_that_attends_to_itself_alone_has_the_head_s_own_order() -> None:
    case = make_case(4)
    attention_LHTT = torch.eye(9).expand_as(case.own.attention_LHTT)
    case = case.but(own=case.own.but(attention_LHTT=attention_LHTT))
    logits = case.logits()
    for row, ids in zip(
        case.scored_S.tolist(), case.candidates(Anchors(of="hidden"), 23), strict=True
    ):
        assert slow.is_order_of(ids, logits[row], 1e-6)


def test_states_after_a_step_do_not_touch_it_even_if_they_are_no_numbers() -> None:
    case = make_case(6, scored=[2, 4, 7])
    hidden_TE = case.hidden_TE.clone()
    hidden_TE[5:] = torch.nan
    noise = case.but(own=case.own.but(hidden_TE=hidden_TE, scored_S=torch.tensor([2, 4])))
    one = Anchors(of="hidden", top=100)
    assert noise.candidates(one, 23) == case.candidates(one, 23)[:2]


@pytest.mark.parametrize("power", [0.0, 1.0, 50.0])
def test_attention_that_all_but_vanishes_beside_the_first_position_still_counts(
    power: float,
) -> None:
    case = make_case(7)
    attention_LHTT = case.own.attention_LHTT.clone()
    attention_LHTT[..., 1:] *= 1e-20
    faint = case.but(own=case.own.but(attention_LHTT=attention_LHTT))
    one = Anchors(power=power)
    for row, ids in zip(case.scored_S.tolist(), faint.candidates(one, 23), strict=True):
        scores = wanted_scores(case, one, row)
        assert scores is not None
        assert slow.is_order_of(ids, scores, 1e-4)


def test_the_cost_is_pooling_and_a_product_with_the_whole_vocabulary() -> None:
    case = make_case(scored=[2, 6])
    (dot,) = case.evaluate([Anchors(top=4)], [5])
    assert dot["macs"] == pytest.approx(((2 + 4) / 2 + 23) * 6)
    assert dot["bytes"] == pytest.approx(dot["macs"] * 4)
    (cosine,) = case.evaluate([Anchors(top=4, metric="cosine")], [5])
    assert cosine["macs"] == pytest.approx(dot["macs"] + 23)


def test_text_of_anchors_parses_back() -> None:
    one = replace(Anchors(), of="past", layers=LayerChoice.parse("1-2"), power=0.5)
    assert one.text == "anchors:of=past,layers=1-2,top=16,power=0.5,metric=dot"
    assert parse_estimator(one.text) == one
