"""Output projections, found by watching, against what each family calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import architectures, tiny
from tracekit.model.oproj import Projection, output_projections
from tracekit.model.read_spec import read_spec

NAMES = {
    "llama": "self_attn.o_proj",
    "qwen3": "self_attn.o_proj",
    "gpt2": "attn.c_proj",
    "gpt_neox": "attention.dense",
    "gemma3n": "self_attn.o_proj",
    "gpt_oss": "self_attn.o_proj",
    "opt": "self_attn.out_proj",
    "falcon": "self_attention.dense",
    "bloom": "self_attention.dense",
    "mpt": "attn.out_proj",
    "gpt_neo": "attn.attention.out_proj",
}


def found_in(model: Any) -> dict[int, Projection]:
    return output_projections(model, read_spec(model, name="x", num_tokens=265))


def shaken(family: str) -> Any:
    """Return a model whose weights and biases are all far from 0."""
    model = architectures.model(family)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("family", NAMES)
def test_the_projection_of_each_layer_is_found(family: str) -> None:
    model = shaken(family)
    found = found_in(model)
    assert sorted(found) == [0, 1, 2, 3]
    for layer, projection in found.items():
        [module] = [
            one for name, one in model.named_modules() if name.endswith(f".{layer}.{NAMES[family]}")
        ]
        weight = module.weight.T if family == "gpt2" else module.weight
        assert torch.equal(projection.weight, weight)
        assert (projection.bias_E is None) == (getattr(module, "bias", None) is None)
        joined = torch.randn(5, weight.shape[1])
        ours = nn.functional.linear(joined, projection.weight, projection.bias_E)
        torch.testing.assert_close(ours, module(joined))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_projections_of_half_precision_are_found(dtype: torch.dtype) -> None:
    model = shaken("llama").to(dtype)
    found = found_in(model)
    assert all(one.weight.dtype == dtype for one in found.values())
    assert sorted(found) == [0, 1, 2, 3]


def test_a_gate_before_the_projection_is_noticed() -> None:
    assert found_in(architectures.model("qwen3_next")) == {}
    model = tiny.model()
    model.model.layers[2].self_attn.o_proj.register_forward_pre_hook(lambda _, args: args[0] * 2)
    assert sorted(found_in(model)) == [0, 1, 3]


def test_two_matrices_that_read_the_same_attention_are_no_projection() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down = base, nn.Linear(32, 2, bias=False)
            self.up = nn.Linear(2, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.base(x) + self.up(self.down(x))
            return out

    model = tiny.model()
    attention = model.model.layers[1].self_attn
    attention.o_proj = Adapted(attention.o_proj)
    assert sorted(found_in(model)) == [0, 2, 3]


def test_a_module_that_does_more_than_its_matrix_is_no_projection() -> None:
    model = tiny.model()
    model.model.layers[0].self_attn.o_proj.forward = lambda x: x.clone()
    assert sorted(found_in(model)) == [1, 2, 3]


def test_refused_layers_are_left_out_and_hooks_are_gone() -> None:
    model = architectures.model("llama4")
    assert sorted(found_in(model)) == [3]
    assert not any(one._forward_hooks for one in model.modules())
