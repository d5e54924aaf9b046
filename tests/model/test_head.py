from __future__ import annotations

import pytest
import torch

from tests import architectures
from tests.model.test_tap import Watch, ids
from tracekit.errors import ModelError
from tracekit.model.head import head_tensors
from tracekit.model.read_spec import read_spec
from tracekit.model.tap import tap


@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2", "cohere", "granite", "gemma2"])
def test_logits_follow_from_the_tensors_and_the_spec(family: str) -> None:
    model, watch = architectures.model(family), Watch()
    head = read_spec(model, name=family, num_tokens=265).head
    tensors = head_tensors(model)
    with torch.no_grad(), tap(model, watch):
        real = model(ids()).logits
    logits = watch.ends[0].hidden_BTE @ tensors["head.weight"].T
    logits = head.scale * (logits + tensors.get("head.bias", torch.zeros(1)))
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    assert (logits - real).abs().max() < 1e-5


def test_tensors_are_named_and_a_tied_embedding_is_not_kept_twice() -> None:
    assert set(head_tensors(architectures.model("llama"))) == {
        "head.weight",
        "norm.weight",
        "embedding.weight",
    }
    assert set(head_tensors(architectures.model("llama tied"))) == {"head.weight", "norm.weight"}
    assert set(head_tensors(architectures.model("gpt2"))) == {
        "head.weight",
        "norm.weight",
        "norm.bias",
    }


def test_a_bias_of_the_head_is_kept_and_used() -> None:
    model = architectures.model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(272))
    assert read_spec(model, name="x", num_tokens=265).head.has_bias
    assert torch.equal(head_tensors(model)["head.bias"], model.lm_head.bias)


def test_a_packed_head_is_refused() -> None:
    model = architectures.model("llama")
    model.lm_head.weight = torch.nn.Parameter(
        torch.zeros(272, 16, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(ModelError, match=r"packed as torch\.uint8"):
        head_tensors(model)
