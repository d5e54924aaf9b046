"""Attention computed by somebody else: the model goes on with it, and is left as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import architectures
from tests.model.test_tap import Watch, ids, num_hooks
from tracekit.errors import ModelError, UsageError
from tracekit.measure.attention import logits_HQK, outputs_HQD, visible_QK, weights_HQK
from tracekit.model.read_spec import read_spec
from tracekit.model.steer import steered
from tracekit.model.tap import tap

if TYPE_CHECKING:
    from tracekit.spec import ModelSpec

FAMILIES = [
    "llama",
    "llama one kv head",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gpt_oss",
    "smollm3",
    "cohere2",
    "granite",
    "opt",
]

BY_THEMSELVES = ["falcon", "falcon new", "falcon alibi", "bloom", "mpt", "gpt_neo"]


class Plain:
    """Attends as the specs of a model say, in float64; notes who asked."""

    def __init__(self, spec: ModelSpec, factor: float = 1.0) -> None:
        self._spec, self._factor = spec, factor
        self.asked: list[int] = []
        self.shapes: list[tuple[torch.Size, ...]] = []

    def attend(
        self,
        layer: int,
        query_BHQD: torch.Tensor,
        key_BGQD: torch.Tensor,
        value_BGQD: torch.Tensor,
    ) -> torch.Tensor:
        self.asked.append(layer)
        self.shapes.append(tuple(one.shape for one in (query_BHQD, key_BGQD, value_BGQD)))
        spec, num_rows = self._spec.layers[layer], query_BHQD.shape[2]
        seen_QK = visible_QK(spec, num_rows, num_rows, first_query=0)
        outputs = []
        for query, key, value in zip(query_BHQD, key_BGQD, value_BGQD, strict=True):
            logits_QK = logits_HQK(query.double(), key.double(), spec)
            weights = weights_HQK(logits_QK.masked_fill(~seen_QK, -torch.inf), spec)
            outputs.append(self._factor * outputs_HQD(weights, value.double()))
        return torch.stack(outputs)


class Failing:
    """Cannot attend."""

    def attend(self, layer: int, *args: torch.Tensor) -> torch.Tensor:
        msg = f"layer {layer}"
        raise RuntimeError(msg)


def plain_for(model: Any, factor: float = 1.0) -> Plain:
    return Plain(read_spec(model, name="tiny", num_tokens=265), factor)


def logits_of(model: Any, batch: int = 1) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids(batch=batch), use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_attention_in_its_place_gives_the_models_own_logits(family: str) -> None:
    model = architectures.model(family)
    own, steering = logits_of(model, batch=2), plain_for(model)
    with steered(model, steering):
        logits = logits_of(model, batch=2)
    torch.testing.assert_close(logits, own, atol=1e-4, rtol=1e-4)
    assert steering.asked == [0, 1, 2, 3]


def test_it_is_asked_once_a_layer_and_pass_with_the_rows_of_the_pass() -> None:
    model = architectures.model("llama")
    steering = plain_for(model)
    with steered(model, steering):
        logits_of(model, batch=3)
        logits_of(model)
    assert steering.asked == [0, 1, 2, 3, 0, 1, 2, 3]
    assert steering.shapes[0] == ((3, 4, 20, 8), (3, 2, 20, 8), (3, 2, 20, 8))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_what_it_returns_is_what_the_model_goes_on_with(family: str) -> None:
    model = architectures.model(family)
    own = logits_of(model)
    with steered(model, plain_for(model, factor=0.0)):
        assert (logits_of(model) - own).abs().max() > 1e-3
    assert torch.equal(logits_of(model), own)


def test_outputs_of_another_type_are_rounded_to_the_models() -> None:
    model = architectures.model("llama").to(torch.bfloat16)
    with steered(model, plain_for(model)):
        assert logits_of(model).dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_gone_afterwards(family: str) -> None:
    model = architectures.model(family)
    own, bare, table = logits_of(model), num_hooks(model), dict(ALL_ATTENTION_FUNCTIONS)
    with steered(model, plain_for(model)):
        logits_of(model)
    assert num_hooks(model) == bare
    assert dict(ALL_ATTENTION_FUNCTIONS) == table
    assert torch.equal(logits_of(model), own)


def test_everything_is_gone_after_an_exception() -> None:
    model = architectures.model("llama")
    own, bare, table = logits_of(model), num_hooks(model), dict(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(RuntimeError, match="layer 0"), steered(model, Failing()):
        logits_of(model)
    assert num_hooks(model) == bare
    assert dict(ALL_ATTENTION_FUNCTIONS) == table
    with tap(model, Watch()):
        assert torch.equal(logits_of(model), own)


def test_an_override_of_someone_else_is_not_called_but_put_back() -> None:
    model, called = architectures.model("llama"), []
    steering = plain_for(model)
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return original(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
    try:
        with steered(model, steering):
            logits_of(model)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
        assert not called
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_a_second_steering_and_a_tap_inside_are_refused_and_the_outer_one_goes_on() -> None:
    model = architectures.model("llama")
    outer = plain_for(model)
    with steered(model, outer):
        with pytest.raises(UsageError, match="open already"), steered(model, plain_for(model)):
            pass
        with pytest.raises(UsageError, match="open already"), tap(model, Watch()):
            pass
        logits_of(model)
    assert outer.asked == [0, 1, 2, 3]


def test_a_steering_in_a_tap_is_refused_and_the_tap_goes_on() -> None:
    model, watch = architectures.model("llama"), Watch()
    with tap(model, watch):
        with pytest.raises(UsageError, match="open already"), steered(model, plain_for(model)):
            pass
        logits_of(model)
    assert len(watch.calls) == 4


@pytest.mark.parametrize("family", BY_THEMSELVES)
def test_a_model_that_attends_by_itself_is_refused_by_name(family: str) -> None:
    model = architectures.model(family)
    name, table = type(model).__name__, dict(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(ModelError, match=f"^{name} attends by itself"), steered(model, Failing()):
        pass
    assert dict(ALL_ATTENTION_FUNCTIONS) == table
    logits_of(model)
    # The hook was not taken, nor held.
    with tap(model, Watch()):
        pass


def test_another_model_attends_by_itself_meanwhile() -> None:
    model, other = architectures.model("llama"), architectures.model("llama", seed=3)
    own, steering = logits_of(other), plain_for(model, factor=0.0)
    with steered(model, steering):
        assert torch.equal(logits_of(other), own)
    assert not steering.asked


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_towers_attend_by_themselves(name: str) -> None:
    model = architectures.vision_model(name)
    bare = num_hooks(model)
    pixels = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    tower = next(m for n, m in model.named_modules() if n.endswith("vision_tower"))
    with torch.no_grad():
        own = tower(pixels).last_hidden_state
        steering = plain_for(model)
        with steered(model, steering):
            assert torch.equal(tower(pixels).last_hidden_state, own)
            assert not steering.asked
            logits_of(model)
    assert steering.asked == [0, 1, 2, 3]
    assert num_hooks(model) == bare
