"""The logit lens against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_nearest as slow
from tests.vocab.cases import NUM_LAYERS, make_case
from tracekit.measure.head import Head
from tracekit.vocab.estimator import parse_estimator
from tracekit.vocab.estimators.lens import Lens


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(-NUM_LAYERS, NUM_LAYERS - 1),
    st.integers(1, 23),
    st.booleans(),
)
def test_lens_is_the_order_of_the_head_s_logits_of_the_layer(
    seed: int, layer: int, limit: int, has_bias: bool
) -> None:
    case = make_case(seed, has_bias=has_bias)
    bias = None if case.head.bias_V is None else case.head.bias_V.tolist()
    ranked = case.candidates(Lens(layer=layer), limit)
    for row, ids in zip(case.scored_S.tolist(), ranked, strict=True):
        state = case.own.residual_LTE[layer, row].tolist()
        assert len(ids) == limit
        assert slow.is_order_of(ids, slow.lens(state, case.head.weight_VE.tolist(), bias), 1e-5)


def test_a_layer_counted_from_the_top_is_the_same_layer() -> None:
    case = make_case()
    assert case.candidates(Lens(layer=-1), 23) == case.candidates(Lens(layer=NUM_LAYERS - 1), 23)


def test_a_layer_that_ends_in_the_final_state_gives_the_order_of_the_true_logits() -> None:
    case = make_case(1)
    case = case.but(own=case.own.but(residual_LTE=case.hidden_TE.expand(NUM_LAYERS, -1, -1)))
    assert case.candidates(Lens(layer=-1), 23) == case.candidates(parse_estimator("oracle"), 23)


def test_masked_tokens_come_last() -> None:
    case = make_case(2, has_bias=True)
    bias_V = case.head.bias_V
    assert bias_V is not None
    bias_V = bias_V.index_fill(0, torch.tensor([0, 5]), -torch.inf)
    case = case.but(head=Head(case.head.weight_VE, bias_V, case.head.spec))
    for ids in case.candidates(Lens(), 23):
        assert ids[-2:] == [0, 5]


def test_the_cost_is_that_of_the_full_head() -> None:
    case = make_case(has_bias=True)
    (cell,) = case.evaluate([Lens()], [3])
    assert cell["macs"] == case.head.macs
    assert cell["bytes"] == case.head.num_bytes


@pytest.mark.parametrize("text", ["lens:layer=-3", "lens:layer=0", "lens:layer=26"])
def test_text_of_a_lens_parses_back(text: str) -> None:
    assert parse_estimator(text).text == text
