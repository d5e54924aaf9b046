from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.measure.attention import logits_HQK, outputs_HQD, visible_QK, weights_HQK
from tracekit.model.fit import fit_bias, is_straight
from tracekit.model.tap import AttentionCall
from tracekit.spec import LayerSpec

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
HIDDEN = torch.finfo(torch.float32).min


def made(scale: float, slopes: tuple[float, ...] | None, num_tokens: int = 12) -> LayerSpec:
    """Return a layer with such a bias."""
    return LayerSpec(index=0, kind="full", scale=scale, alibi=slopes, **SHAPE)


def called(layer: LayerSpec, num_tokens: int = 12, offset: float = 0.0) -> AttentionCall:
    """Return a call of a layer that attends so, as one that bypasses the table shows it."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(heads, num_tokens, 8) for heads in (4, 2, 2))
    seen = visible_QK(layer, num_tokens, num_tokens, first_query=0)
    logits = logits_HQK(query, key, layer) + offset * torch.arange(num_tokens)[:, None]
    logits = logits.masked_fill(~seen, HIDDEN)
    output = outputs_HQD(weights_HQK(logits, layer), value)
    return AttentionCall(
        layer=0,
        query_BHQD=query[None],
        key_BGKD=key[None],
        value_BGKD=value[None],
        mask=seen[None, None],
        scale=None,
        softcap=None,
        window=None,
        sinks_H=None,
        output_BQHD=output[None].transpose(1, 2),
        logits_BHQK=logits[None],
    )


slopes = st.one_of(st.none(), st.tuples(*[st.floats(0.01, 1)] * 4))


@settings(deadline=None)
@given(scale=st.floats(0.05, 2), slopes=slopes, offset=st.floats(-1, 1))
def test_scale_and_slopes_are_found_whatever_is_added_to_a_row(
    scale: float, slopes: tuple[float, ...] | None, offset: float
) -> None:
    layer = made(scale, slopes)
    found, alibi = fit_bias(called(layer, offset=offset))
    assert found == pytest.approx(scale, rel=2e-4)
    assert alibi == (None if slopes is None else pytest.approx(slopes, rel=1e-3, abs=1e-4))


def test_usual_scales_are_exact() -> None:
    for scale in (1.0, 8**-0.5):
        assert fit_bias(called(made(scale, None)))[0] == scale


def test_biases_that_bend_are_not_straight() -> None:
    layer = made(0.5, (0.5, 0.25, 0.125, 0.0625))
    call = called(layer, num_tokens=320)
    assert is_straight(call, layer)
    assert call.logits_BHQK is not None
    bent = call.logits_BHQK + 0.2 * (torch.arange(320) % 2)
    assert not is_straight(type(call)(**{**vars(call), "logits_BHQK": bent}), layer)


@settings(deadline=None)
@given(first_key=st.integers(0, 50), num_queries=st.integers(1, 4), seed=st.integers(0, 99))
def test_alibi_is_a_bias_by_distance(first_key: int, num_queries: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = made(0.3, (0.5, 0.25, 0.125, 0.0625))
    num_keys = num_queries + 3
    query = torch.randn(4, num_queries, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(2, num_keys, 8, generator=generator, dtype=torch.float64)
    first_query = first_key + num_keys - num_queries
    seen = visible_QK(layer, num_queries, num_keys, first_query=first_query, first_key=first_key)
    scores = logits_HQK(query, key, layer).masked_fill(~seen, -torch.inf)
    weights = weights_HQK(scores, layer)
    assert layer.alibi is not None
    for head in range(4):
        for row in range(num_queries):
            terms = {
                k: 0.3 * float(query[head, row] @ key[head // 2, k])
                - layer.alibi[head] * (first_query + row - first_key - k)
                for k in range(num_keys)
                if first_key + k <= first_query + row
            }
            total = torch.tensor(list(terms.values())).exp().sum()
            for k in range(num_keys):
                truth = float(torch.tensor(terms[k]).exp() / total) if k in terms else 0.0
                assert float(weights[head, row, k]) == pytest.approx(truth, abs=1e-6)
