"""The final norm as it is read from models, against the modules themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import architectures, tiny
from tests.model.test_tap import ids
from tracekit.errors import ModelError
from tracekit.measure.norm import Norm
from tracekit.model import norm as norm_module
from tracekit.model.head import final_norm, head_tensors
from tracekit.model.norm import last_layer, refuse_residuals
from tracekit.model.probe import watch
from tracekit.model.read_spec import read_spec
from tracekit.spec import ModelSpec

EXPECTED: dict[str, tuple[str, float, bool]] = {
    "llama": ("rms", 0.0, False),
    "qwen3": ("rms", 0.0, False),
    "gemma2": ("rms", 1.0, False),
    "gemma3": ("rms", 1.0, False),
    "gpt2": ("layer", 0.0, True),
    "falcon": ("layer", 0.0, True),
    "bloom": ("layer", 0.0, True),
    "cohere": ("layer", 0.0, False),
    "opt": ("layer", 0.0, True),
    "mamba": ("rms", 0.0, False),
    "qwen3_next": ("rms", 1.0, False),
    "olmo2": ("rms", 0.0, False),
    "olmo": ("layer", 0.0, False),
}
"""By family: kind, offset of the weight, whether there is a bias."""


def module_of(model: Any) -> Any:
    """Return the final norm of a model that has one."""
    module = final_norm(model)
    assert module is not None
    return module


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny model whose final norm has random weights."""
    is_known = family in architectures.SETTINGS
    model = architectures.model(family) if is_known else tiny.model(family)
    torch.manual_seed(3)
    for weight in module_of(model).parameters():
        weight.data = 1 + torch.randn_like(weight) / 2
    return model.to(dtype)


def spec_of(model: Any) -> ModelSpec:
    return read_spec(model, name="tiny", num_tokens=265)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", EXPECTED)
def test_the_norm_of_the_last_residual_is_the_final_hidden_state(
    family: str, dtype: torch.dtype
) -> None:
    model = model_of(family, dtype)
    spec = spec_of(model).norm
    assert spec is not None
    assert (spec.kind, spec.weight_offset, spec.has_bias) == EXPECTED[family]
    tensors = head_tensors(model)
    norm = Norm(tensors.get("norm.weight"), tensors.get("norm.bias"), spec)
    seen = watch(model, ids(), residuals=last_layer(model))
    [residual] = seen.residuals.values()
    ours, real = norm.apply(residual), seen.end.hidden_BTE
    gate = 1e-5 if dtype == torch.float32 else 1e-2
    assert (ours.float() - real.float()).abs().max() <= gate * real.abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "olmo2"])
def test_rms_norms_in_half_precision_are_those_of_the_module_bit_for_bit(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    spec = spec_of(model).norm
    assert spec is not None
    norm = Norm(module_of(model).weight, None, spec)
    hidden_TE = 3 * torch.randn(50, 32).bfloat16()
    assert torch.equal(norm.apply(hidden_TE), module_of(model)(hidden_TE))


@pytest.mark.parametrize("eps", [1e-3, 1e-7])
def test_eps_is_that_of_the_module_and_seen_in_small_states(eps: float) -> None:
    model = tiny.model(rms_norm_eps=eps)
    spec = spec_of(model).norm
    assert spec is not None
    assert spec.eps == pytest.approx(eps)


def test_a_module_that_is_no_norm_is_not_understood() -> None:
    model = tiny.model()
    model.model.norm.register_forward_hook(lambda module, args, output: output.sin())
    spec = spec_of(model)
    assert spec.norm is None
    with pytest.raises(
        ModelError, match=r"is no norm that is understood.*leave out --hidden-layers"
    ):
        refuse_residuals(spec)


def test_states_of_several_streams_are_not_understood() -> None:
    assert spec_of(architectures.model("gemma3n")).norm is None


def test_layers_that_cannot_be_told_apart_have_no_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> list[Any]:
        msg = "in no list"
        raise ModelError(msg)

    monkeypatch.setattr(norm_module, "decoder_layers", refuse)
    assert spec_of(tiny.model()).norm is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_spec_with_a_norm_survives_its_trip_through_json(family: str) -> None:
    spec = spec_of(model_of(family))
    assert ModelSpec.from_json(spec.to_json()) == spec


def test_a_spec_of_an_older_trace_has_neither_norm_nor_size() -> None:
    data = spec_of(tiny.model()).to_json()
    for name in ("norm", "num_parameters", "num_weight_bytes"):
        del data[name]
    old = ModelSpec.from_json(data)
    assert (old.norm, old.num_parameters, old.num_weight_bytes) == (None, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_are_counted_once(dtype: torch.dtype) -> None:
    tied = spec_of(tiny.model(tie_word_embeddings=True).to(dtype))
    untied = spec_of(tiny.model(tie_word_embeddings=False).to(dtype))
    assert tied.num_parameters is not None
    assert untied.num_parameters == tied.num_parameters + 272 * 32
    assert tied.num_weight_bytes == tied.num_parameters * dtype.itemsize
