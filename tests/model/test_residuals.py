"""Hidden states that leave layers, against those that the model returns itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests import architectures
from tests.model.test_tap import Watch, ids, num_hooks
from tracekit.model.resume import watched_layers
from tracekit.model.tap import tap


@pytest.mark.parametrize(
    "family",
    ["llama", "gpt2", "gemma2", "falcon", "bloom", "qwen3_next", "mixtral", "mpt"],
)
def test_residuals_are_the_hidden_states_that_the_model_returns(family: str) -> None:
    model, seen = architectures.model(family), dict[int, torch.Tensor]()
    leaving = {layer: partial(seen.__setitem__, layer) for layer in (0, 2)}
    with torch.no_grad(), tap(model, Watch(), leaving):
        wanted = model(ids(batch=2), output_hidden_states=True).hidden_states
    assert seen.keys() == {0, 2}
    for layer, hidden_BTE in seen.items():
        assert torch.equal(hidden_BTE, wanted[layer + 1])


@pytest.mark.parametrize("family", ["llama", "jamba", "mamba", "deepseek_v3", "gpt_oss"])
def test_what_leaves_a_layer_enters_the_next(family: str) -> None:
    model = architectures.model(family)
    left, entered = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    leaving = {layer: partial(left.__setitem__, layer) for layer in range(4)}
    with (
        torch.no_grad(),
        tap(model, Watch(), leaving),
        watched_layers(model, entered.__setitem__),
    ):
        model(ids(batch=2))
    for layer in range(3):
        assert torch.equal(left[layer], entered[layer + 1])


def test_hooks_on_layers_are_gone_after_a_failure() -> None:
    model = architectures.model("llama")
    before = num_hooks(model)

    def fail(hidden_BTE: torch.Tensor) -> None:
        msg = "listener"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="listener"), tap(model, Watch(), {1: fail}):
        model(ids())
    assert num_hooks(model) == before
    with pytest.raises(IndexError), tap(model, Watch(), {0: fail, 4: fail}):
        model(ids())
    assert num_hooks(model) == before
