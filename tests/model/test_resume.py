"""Passes that begin at a layer are whole passes, the layers below them not run."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import architectures
from tests.model.test_tap import ids, num_hooks
from tracekit.errors import ModelError
from tracekit.model.resume import (
    decoder_layers,
    entered_at,
    layer_calls,
    left_with,
    watched_layers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES = [
    "llama",
    "llama tied",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "smollm3",
    "cohere2",
    "granite",
    "opt",
]


def logits_of(model: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids(), use_cache=False, **more).logits
    return logits


def inputs_of(model: Any) -> dict[int, torch.Tensor]:
    """Return what enters each layer."""
    seen: dict[int, torch.Tensor] = {}
    with watched_layers(model, seen.__setitem__):
        logits_of(model)
    return seen


@contextmanager
def counted(model: Any) -> Iterator[Counter[int]]:
    """Count the calls of a norm of each layer: a layer that is passed over does not call it."""
    calls: Counter[int] = Counter()
    handles = []
    for number, layer in enumerate(decoder_layers(model)):
        part = next(m for n, m in layer.named_children() if "norm" in n or n.startswith("ln"))
        handles.append(part.register_forward_hook(lambda *_, number=number: calls.update([number])))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", range(4))
def test_a_pass_that_begins_at_a_layer_is_the_whole_pass(family: str, layer: int) -> None:
    model = architectures.model(family)
    own, inputs = logits_of(model), inputs_of(model)
    with counted(model) as calls, entered_at(model, layer, inputs[layer]):
        assert torch.equal(logits_of(model), own)
    assert set(calls) == set(range(layer, 4))


@pytest.mark.parametrize("layer", range(4))
def test_streams_of_several_states_are_handed_on_as_they_are(layer: int) -> None:
    # Keys of a layer below would be missed by layers that share them.
    model = architectures.model("gemma3n", num_kv_shared_layers=0)
    own, inputs = logits_of(model), inputs_of(model)
    assert inputs[layer].ndim == 4
    with entered_at(model, layer, inputs[layer]):
        assert torch.equal(logits_of(model), own)


def test_a_model_inside_another_begins_at_a_layer_too() -> None:
    model = architectures.vision_model("llava")
    own, inputs = logits_of(model), inputs_of(model)
    with counted(model) as calls, entered_at(model, 2, inputs[2]):
        assert torch.equal(logits_of(model), own)
    assert set(calls) == {2, 3}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_other_states_give_what_the_upper_layers_make_of_them(family: str) -> None:
    model = architectures.model(family)
    inputs = inputs_of(model)
    other = torch.rand_like(inputs[2])
    with entered_at(model, 2, other):
        found = logits_of(model)
    # The layer below is run, and what it gives is replaced.
    handle = decoder_layers(model)[1].register_forward_hook(lambda *_: other)
    true = logits_of(model)
    handle.remove()
    assert torch.equal(found, true)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_begins_after_the_last_layer_is_norm_and_head_alone(family: str) -> None:
    model = architectures.model(family)
    own = logits_of(model)
    last: list[torch.Tensor] = []
    handle = decoder_layers(model)[-1].register_forward_hook(lambda *seen: last.append(seen[-1]))
    logits_of(model)
    handle.remove()
    with counted(model) as calls, left_with(model, last[0]):
        assert torch.equal(logits_of(model), own)
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_can_be_called_again_as_its_model_did(family: str) -> None:
    model = architectures.model(family)
    inputs = inputs_of(model)
    with counted(model) as calls:
        found = layer_calls(model, lambda: logits_of(model))
    assert not calls
    assert [one.layer for one in found] == decoder_layers(model)
    for number in range(3):
        with torch.no_grad():
            assert torch.equal(found[number].output(inputs[number]), inputs[number + 1])


@given(st.integers(0, 3), st.sampled_from(["llama", "gpt2", "qwen3"]))
def test_everything_is_gone_after_an_exception(layer: int, family: str) -> None:
    model = architectures.model(family)
    own, bare, inputs = logits_of(model), num_hooks(model), inputs_of(model)
    contexts = [
        entered_at(model, layer, inputs[layer]),
        left_with(model, inputs[layer]),
        watched_layers(model, lambda *_: None),
    ]
    for context in contexts:
        with pytest.raises(RuntimeError, match="stop"), context:
            raise RuntimeError("stop")
        assert num_hooks(model) == bare
        assert not any("forward" in vars(one) for one in decoder_layers(model))
    assert torch.equal(logits_of(model), own)


def test_a_forward_that_somebody_put_there_is_put_back() -> None:
    model = architectures.model("llama")
    own, inputs = logits_of(model), inputs_of(model)
    layer, called = decoder_layers(model)[0], []
    original = layer.forward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return original(*args, **kwargs)

    layer.forward = theirs
    with entered_at(model, 1, inputs[1]):
        assert torch.equal(logits_of(model), own)
    assert not called
    assert vars(layer)["forward"] is theirs
    assert torch.equal(logits_of(model), own)
    assert called == [1]


def test_a_decoder_without_a_list_of_layers_is_refused_by_name() -> None:
    model = architectures.model("llama")
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    with pytest.raises(ModelError, match="layers of LlamaModel are in no list"):
        decoder_layers(model)
