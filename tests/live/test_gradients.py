"""Gradients layer by layer against autograd of the whole model, and against finite differences."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import architectures, tiny
from tracekit.errors import ModelError
from tracekit.live import gradients
from tracekit.live.gradients import influence
from tracekit.live.run import full_run
from tracekit.model.decoder import layers_by_module
from tracekit.model.load import LoadedModel
from tracekit.model.override import implementations, overridden
from tracekit.model.read_spec import read_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.live.run import FullRun

FAMILIES = [
    "llama",
    "llama one kv head",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "mixtral",
    "cohere",
    "opt",
]
NUM_TOKENS, FIRST, SEED = 21, 13, 7

CLOSE = dict.fromkeys(FAMILIES, 1e-8) | {"gemma2": 1e-5, "gpt_oss": 1e-5}
"""Relative tolerances: eager attention takes its softmax in float32 whatever the model's type."""


@cache
def loaded_of(family: str, dtype: torch.dtype) -> LoadedModel:
    model = architectures.model(family)
    spec = read_spec(model, name="tiny", num_tokens=len(tiny.tokenizer()))
    spec = replace(spec, dtype=str(dtype).removeprefix("torch."))
    # Grouped products of experts are not made for float64.
    model.set_experts_implementation("eager")
    return LoadedModel(model=model.to(dtype), tokenizer=tiny.tokenizer(), spec=spec)


def run_of(
    family: str, *, num_tokens: int = NUM_TOKENS, dtype: torch.dtype = torch.float64
) -> FullRun:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 272, (num_tokens,), generator=generator).tolist()
    return full_run(loaded_of(family, dtype), ids)


def probes(run: FullRun, first: int = FIRST, num_probes: int = 2) -> dict[int, torch.Tensor]:
    layers = range(len(run.spec.layers))
    return dict(influence(run, first, num_probes=num_probes, seed=SEED, layers=layers))


def logits_with(run: FullRun, change: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the logits of one plain pass in which every layer's attention output is changed."""
    model, layers = run.loaded.model, layers_by_module(run.loaded.model)

    def around(
        attend: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, /, **kwargs: Any
    ) -> Any:
        output_BQHD, weights = attend()
        layer = layers[id(module)]
        return change(layer, output_BQHD.transpose(1, 2)).transpose(1, 2), weights

    (name,) = implementations(model)
    with overridden(name, around):
        logits: torch.Tensor = model(run.ids_1T, use_cache=False).logits[0]
    return logits


def drawn(logits_TV: torch.Tensor, first: int, probe: int) -> torch.Tensor:
    """Return the tokens that a probe draws, by walking through the distribution."""
    generator = torch.Generator().manual_seed(SEED + probe)
    uniform = torch.rand(len(logits_TV) - first, dtype=torch.float64, generator=generator)
    labels = []
    for row, at in zip(logits_TV[first:].double().softmax(-1), uniform.tolist(), strict=True):
        passed, label = 0.0, 0
        for label, prob in enumerate(row.tolist()):  # noqa: B007 the last one seen is the one drawn
            passed += prob
            if passed > at:
                break
        labels.append(label)
    return torch.tensor(labels)


def loss_of(logits_TV: torch.Tensor, first: int, label_R: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits_TV[first:], label_R, reduction="sum")


def by_autograd(run: FullRun, first: int, probe: int) -> dict[int, torch.Tensor]:
    """Return gradients of one probe from one graph over the whole model and all its rows."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer: int, output_BHTD: torch.Tensor) -> torch.Tensor:
        output_BHTD.retain_grad()
        outputs[layer] = output_BHTD
        return output_BHTD

    logits_TV = logits_with(run, keep)
    loss_of(logits_TV, first, drawn(logits_TV.detach(), first, probe)).backward()
    run.loaded.model.zero_grad()
    return {layer: one.grad[0, :, first:] for layer, one in outputs.items() if one.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_one_graph_over_the_whole_model(family: str) -> None:
    run = run_of(family)
    found = probes(run)
    assert list(found) == [3, 2, 1, 0]
    for probe in range(2):
        wanted = by_autograd(run, FIRST, probe)
        for layer, own_PHRD in found.items():
            gap = (own_PHRD[probe] - wanted[layer]).abs().max()
            assert gap <= CLOSE[family] * wanted[layer].abs().max()


def loss_moved(run: FullRun, layer: int, step_BHTD: torch.Tensor, label_R: torch.Tensor) -> float:
    with torch.no_grad():
        logits_TV = logits_with(run, lambda at, one: one + step_BHTD if at == layer else one)
    return float(loss_of(logits_TV, FIRST, label_R))


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma2", "gpt_oss"])
def test_a_small_change_of_an_attention_output_moves_the_loss_as_foretold(family: str) -> None:
    run = run_of(family)
    found = probes(run, num_probes=1)
    label_R = drawn(logits_with(run, lambda _, one: one).detach(), FIRST, 0)
    for layer in range(4):
        torch.manual_seed(layer)
        shape = run.references[layer].query_LHTD.shape[:3]
        step_BHTD = torch.zeros(*shape, found[layer].shape[-1], dtype=torch.float64)
        step_BHTD[..., FIRST:, :] = 1e-3 * torch.randn_like(step_BHTD[..., FIRST:, :])
        losses = [loss_moved(run, layer, sign * step_BHTD, label_R) for sign in (1, -1)]
        # Norms are taken in float32 whatever the model's type, so a smaller step drowns in rounding.
        foretold = 2 * float((found[layer][0] * step_BHTD[0, :, FIRST:]).sum())
        assert losses[0] - losses[1] == pytest.approx(foretold, rel=5e-3)


@settings(max_examples=40)
@given(num_tokens=st.integers(1, 24), data=st.data())
def test_any_stretch_of_rows_has_the_gradients_of_the_whole_graph(
    num_tokens: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, num_tokens - 1))
    run = run_of("mistral", num_tokens=num_tokens)
    wanted = by_autograd(run, first, 0)
    for layer, own_PHRD in probes(run, first, 1).items():
        torch.testing.assert_close(own_PHRD[0], wanted[layer], rtol=1e-8, atol=1e-11)


def test_a_probe_is_the_same_however_many_there_are_and_wherever_blocks_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of("llama")
    many, one = probes(run, num_probes=3), probes(run, num_probes=1)
    monkeypatch.setattr(gradients, "LOGIT_BYTES", 3 * 8 * 272)
    cut = probes(run, num_probes=3)
    for layer, own_PHRD in many.items():
        torch.testing.assert_close(own_PHRD[:1], one[layer])
        torch.testing.assert_close(own_PHRD, cut[layer])


def test_chosen_layers_alone_are_yielded_and_none_below_them_is_run() -> None:
    run = run_of("llama")
    num_calls = [0] * 4
    with ExitStack() as stack:
        for number, layer in enumerate(run.loaded.model.model.layers):

            def count(*_: Any, number: int = number) -> None:
                num_calls[number] += 1

            stack.callback(layer.mlp.register_forward_hook(count).remove)
        found = dict(influence(run, FIRST, num_probes=2, seed=SEED, layers=(1, 3)))
    assert list(found) == [3, 1]
    # The top layer is run once more for what norm and head read.
    assert num_calls == [0, 1, 1, 2]
    every = probes(run)
    assert all(torch.equal(own_PHRD, every[layer]) for layer, own_PHRD in found.items())


def test_the_mean_of_many_probes_is_near_nothing() -> None:
    run = run_of("llama", dtype=torch.float32)
    for own_PHRD in probes(run, num_probes=400).values():
        error = own_PHRD.std(0) / 20
        z = own_PHRD.mean(0) / error
        assert float(z.square().mean()) == pytest.approx(1, abs=0.5)
        assert float(z.abs().max()) < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_come_wide_whatever_the_model_computes_in(dtype: torch.dtype) -> None:
    exact, own = (
        probes(run_of("gemma2"), num_probes=4),
        probes(run_of("gemma2", dtype=dtype), num_probes=4),
    )
    for layer, own_PHRD in own.items():
        assert own_PHRD.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(
            own_PHRD.double().flatten(), exact[layer].flatten(), dim=0
        )
        assert cosine > (0.9 if dtype == torch.bfloat16 else 1 - 1e-6)


def test_parameters_are_as_they_were_also_after_an_exception() -> None:
    run = run_of("llama")
    model = run.loaded.model
    model.model.norm.requires_grad_(False)
    before = {name: one.requires_grad for name, one in model.named_parameters()}
    steps = influence(run, FIRST, num_probes=1, seed=SEED, layers=range(4))
    next(steps)
    assert {name: one.requires_grad for name, one in model.named_parameters()} == before
    handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(steps)
    handle.remove()
    assert {name: one.requires_grad for name, one in model.named_parameters()} == before
    assert all(one.grad is None for one in model.parameters())
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_layers_that_share_keys_are_refused_by_name() -> None:
    run = run_of("gemma3n", dtype=torch.float32)
    with pytest.raises(ModelError, match="layer 2 of tiny has no influence probes"):
        probes(run)


def test_a_layer_that_is_handed_more_than_hidden_states_is_refused_by_name() -> None:
    run = run_of("llama")
    run.inputs[3] = 2 * run.inputs[3]
    with pytest.raises(ModelError, match=r"layer 2 of tiny called by itself is off by 5\.0e-01"):
        probes(run)
