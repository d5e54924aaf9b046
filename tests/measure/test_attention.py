"""Attention against torch's own kernel, and against the formula written by loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tracekit.measure.attention import as_wide, logits_HQK, outputs_HQD, visible_QK, weights_HQK
from tracekit.spec import LayerSpec


def make_layer(*, heads: int = 4, groups: int = 2, size: int = 8, **spec: Any) -> LayerSpec:
    return LayerSpec(
        index=0,
        kind="sliding" if spec.get("window") else "full",
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=size,
        value_dim=size,
        **{"scale": size**-0.5} | spec,
    )


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)


def attend(
    layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, *, first_query: int
) -> torch.Tensor:
    """Return weights as the engine and the recorder compute them."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    seen_QK = visible_QK(layer, num_queries, num_keys, first_query=first_query)
    return weights_HQK(logits_HQK(query, key, layer).masked_fill(~seen_QK, -torch.inf), layer)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 12), st.integers(0, 12), st.data())
def test_a_query_sees_keys_up_to_itself_and_inside_its_window(
    num_queries: int, num_keys: int, first_query: int, first_key: int, data: st.DataObject
) -> None:
    window = data.draw(st.none() | st.integers(1, 15))
    seen_QK = visible_QK(
        make_layer(window=window),
        num_queries,
        num_keys,
        first_query=first_query,
        first_key=first_key,
    )
    for i in range(num_queries):
        for j in range(num_keys):
            query, key = first_query + i, first_key + j
            expected = key <= query and (window is None or query - key < window)
            assert bool(seen_QK[i, j]) == expected


def test_a_window_counts_the_query_itself() -> None:
    seen_QK = visible_QK(make_layer(window=2), 4, 4, first_query=0)
    assert seen_QK.sum(-1).tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("spec", [{}, {"window": 5}, {"scale": 0.7}, {"heads": 2}, {"groups": 1}])
def test_outputs_are_those_of_the_kernel_of_torch(
    dtype: torch.dtype, atol: float, spec: dict[str, Any]
) -> None:
    layer = make_layer(**spec)
    query = random(3, layer.num_heads, 11, 8, dtype=dtype)
    key, value = (random(3, layer.num_kv_heads, 11, 8, seed=n, dtype=dtype) for n in (1, 2))
    truth = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible_QK(layer, 11, 11, first_query=0),
        scale=layer.scale,
        enable_gqa=True,
    )
    output = outputs_HQD(attend(layer, query, key, first_query=0), value)
    torch.testing.assert_close(output, truth, atol=atol, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_weights_and_outputs_equal_the_formula_written_by_loops(data: st.DataObject) -> None:
    groups, group_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    heads, num_keys = groups * group_size, data.draw(st.integers(1, 9))
    sinks = data.draw(st.none() | st.lists(st.floats(-9, 9), min_size=heads, max_size=heads))
    layer = make_layer(
        heads=heads,
        groups=groups,
        size=3,
        window=data.draw(st.none() | st.integers(1, 5)),
        softcap=data.draw(st.none() | st.floats(0.5, 50)),
        sinks=None if sinks is None else tuple(sinks),
    )
    first_query = data.draw(st.integers(0, num_keys - 1))
    query = 3 * random(heads, num_keys - first_query, 3)
    key, value = 3 * random(groups, num_keys, 3, seed=1), random(groups, num_keys, 5, seed=2)
    weights = attend(layer, query, key, first_query=first_query)
    output = outputs_HQD(weights, value)
    for h in range(heads):
        g = h // group_size
        for q in range(num_keys - first_query):
            first = max(0, first_query + q + 1 - (layer.window or num_keys))
            logits = {
                k: layer.scale * float(query[h, q] @ key[g, k])
                for k in range(first, first_query + q + 1)
            }
            if layer.softcap is not None:
                cap = layer.softcap
                logits = {k: cap * math.tanh(logit / cap) for k, logit in logits.items()}
            total = sum(math.exp(logit) for logit in logits.values())
            total += math.exp(sinks[h]) if sinks is not None else 0.0
            expected = [
                math.exp(logits[k]) / total if k in logits else 0.0 for k in range(num_keys)
            ]
            np.testing.assert_allclose(weights[h, q], expected, atol=1e-12)
            mean = sum(a * value[g, k].numpy() for k, a in enumerate(expected))
            np.testing.assert_allclose(output[h, q], mean, atol=1e-12)


@pytest.mark.parametrize("sinks", [None, (0.0, 1.0, -1.0, 2.0)])
def test_a_row_that_sees_nothing_is_zero(sinks: tuple[float, ...] | None) -> None:
    scores = torch.full((4, 2, 3), -torch.inf)
    assert torch.equal(weights_HQK(scores, make_layer(sinks=sinks)), torch.zeros(4, 2, 3))


def test_a_sink_takes_what_the_row_lacks_of_one() -> None:
    layer = make_layer(sinks=(0.0, 0.0, math.log(3), -torch.inf))
    weights = weights_HQK(torch.zeros(4, 1, 1), layer)
    torch.testing.assert_close(weights.flatten(), torch.tensor([0.5, 0.5, 0.25, 1.0]))


@pytest.mark.parametrize("logit", [-3e38, -1e4, 0.0, 1e4, 3e38])
def test_logits_of_any_size_give_finite_weights(logit: float) -> None:
    weights = weights_HQK(torch.tensor([[[logit, logit, -torch.inf]]]), make_layer())
    assert weights.flatten().tolist() == [0.5, 0.5, 0.0]
    far = weights_HQK(torch.tensor([[[logit, -3.4e38]]]), make_layer()).flatten()
    assert far.tolist() == [1.0, 0.0]


def test_a_sink_far_above_all_logits_takes_everything() -> None:
    layer = make_layer(heads=1, groups=1, sinks=(1e4,))
    assert weights_HQK(torch.zeros(1, 1, 3), layer).flatten().tolist() == [0.0, 0.0, 0.0]


def test_logits_do_not_exceed_the_soft_cap() -> None:
    logits = logits_HQK(100 * random(4, 5, 8), random(2, 7, 8, seed=1), make_layer(softcap=5.0))
    assert logits.abs().max() <= 5.0
    assert logits.abs().max() > 4.9


def test_leading_axes_are_carried_along() -> None:
    layer = make_layer(softcap=4.0, sinks=(0.0, 1.0, -1.0, 2.0))
    query, key, value = random(2, 3, 4, 6, 8), random(2, 3, 2, 6, 8, seed=1), random(2, 3, 2, 6, 5)
    weights = attend(layer, query, key, first_query=0)
    output = outputs_HQD(weights, value)
    assert output.shape == (2, 3, 4, 6, 5)
    for i in range(2):
        for j in range(3):
            alone = attend(layer, query[i, j], key[i, j], first_query=0)
            torch.testing.assert_close(weights[i, j], alone)
            torch.testing.assert_close(output[i, j], outputs_HQD(alone, value[i, j]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_float32(dtype: torch.dtype) -> None:
    layer = make_layer()
    query, key, value = random(4, 6, 8).to(dtype), random(2, 6, 8).to(dtype), random(2, 6, 8)
    logits, wide = logits_HQK(query, key, layer), logits_HQK(query.float(), key.float(), layer)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, wide)
    weights = weights_HQK(logits, layer)
    half = value.to(dtype)
    assert torch.equal(outputs_HQD(weights, half), outputs_HQD(weights, half.float()))


def test_float64_stays_and_its_input_is_not_copied() -> None:
    array = random(3)
    assert as_wide(array) is array
    assert as_wide(array.half()).dtype == torch.float32


def test_inputs_are_not_written_to() -> None:
    layer = make_layer(softcap=4.0)
    arrays = random(4, 6, 8), random(2, 6, 8, seed=1)
    before = [array.clone() for array in arrays]
    scores = logits_HQK(*arrays, layer)
    kept = scores.clone()
    weights_HQK(scores, layer)
    assert torch.equal(scores, kept)
    assert all(map(torch.equal, arrays, before))
