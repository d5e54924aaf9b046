"""The whole way on every family: what is recorded is true, and what cannot be is said once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import architectures, tiny
from tracekit.measure.attention import logits_HQK, visible_QK, weights_HQK
from tracekit.measure.tensors import to_torch
from tracekit.model.versions import quiet
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.schema import SINK_KEYS
from tracekit.simulate.plan import make_plan
from tracekit.simulate.run import simulate
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from pathlib import Path

DECODERS = [name for name in architectures.SETTINGS if name != "bert"]
WITHOUT_ATTENTION = ["falcon alibi", "mamba"] + ["deepseek_v3"] * (not architectures.BEFORE_5_16)
"""Recorded, and not replayed yet: the engine does not know ALiBi."""


class Notes:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, what: str, total: int, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int = 1) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        self.told.append(text)


def recorded(model: Any, folder: Path, notes: Notes) -> Trace:
    """Return the trace of a model on one prompt."""
    with quiet():
        model.save_pretrained(folder / "model")
        tiny.tokenizer().save_pretrained(folder / "model")
    (folder / "p.txt").write_text("the rain on the river in the morning was long\n")
    options = RecordOptions(max_new_tokens=14)
    done = record(
        str(folder / "model"), str(folder / "p.txt"), folder / "t", options, progress=notes
    )
    assert done.num_sequences == 1
    assert validate(folder / "t").problems == ()
    return Trace(folder / "t")


@pytest.mark.parametrize("name", DECODERS)
def test_a_family_is_recorded_and_replayed(name: str, tmp_path: Path) -> None:
    notes, model = Notes(), architectures.model(name)
    trace = recorded(model, tmp_path, notes)
    seen = [one.index for one in trace.spec.layers if one.num_heads and one.refusal is None]
    assert ("gives no attention" in " ".join(notes.told)) == (name in WITHOUT_ATTENTION)
    assert trace.stored_layers(trace.sequence_ids[0]) == seen
    simulated = simulate(tmp_path / "t", tmp_path / "r", make_plan(sizes=(16,)))
    assert not simulated.failed
    reasons = {one["why"] for one in simulated.skipped}
    assert any("no layer can be replayed" in why for why in reasons) == (name in WITHOUT_ATTENTION)
    # There is one prompt, so nothing to learn from others; some families have layers without keys.
    known = ("no layer can be replayed", "fitted on other prompts", "reads the attention of layer")
    assert all(any(words in why for words in known) for why in reasons)

    ids = torch.tensor(trace.table("tokens")["token_id"].to_numpy())[None]
    check_tokens(model, ids, prompt_end=int(trace.sequences["prompt_end"].iloc[0]))
    if seen:
        check_statistics(architectures.model(name, attn_implementation="eager"), ids, trace)


def check_tokens(model: Any, ids: torch.Tensor, *, prompt_end: int) -> None:
    """Compare recorded tokens with those that the model makes without us."""
    prompt = ids[:, :prompt_end]
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=14,
        do_sample=False,
        use_cache=True,
    )
    assert torch.equal(made, ids)


def check_statistics(eager: Any, ids: torch.Tensor, trace: Trace) -> None:
    """Compare recorded statistics with those of the maps that eager attention returns."""
    with torch.no_grad():
        output = eager(ids[:, :-1], use_cache=False, output_attentions=True)
    by_layer = [one[0].double() for one in output.attentions if one is not None]
    table = trace.table("attention")
    attending = [layer.index for layer in trace.spec.layers if layer.num_heads]
    for layer, weights in zip(attending, by_layer, strict=True):
        if trace.spec.layers[layer].refusal is not None:
            continue
        rows = table[table["layer"] == layer].sort_values(["head", "query"])
        shares = weights / weights.sum(-1, keepdim=True)
        entropy = -torch.special.xlogy(shares, shares).sum(-1)
        ours = torch.tensor(rows["entropy_nats"].to_numpy()).reshape(entropy.shape)
        assert (ours - entropy).abs().max() < 1e-5
        sinks = torch.tensor(rows["sink_mass"].to_numpy()).reshape(entropy.shape)
        assert (sinks - weights[..., :SINK_KEYS].sum(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("name", architectures.VISION)
def test_a_vision_language_model_is_recorded_on_text(name: str, tmp_path: Path) -> None:
    trace = recorded(architectures.vision_model(name), tmp_path, Notes())
    assert trace.stored_layers(trace.sequence_ids[0]) == [0, 1, 2, 3]
    assert not simulate(tmp_path / "t", tmp_path / "r", make_plan(sizes=(16,))).failed


HALF_PRECISION_BOUND = 1e-5
"""Statistics are taken in float32 from the very queries and keys: rounding of their type is none."""


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "falcon", "gpt_neo", "gpt2"])
def test_statistics_of_bfloat16_models_are_those_of_float64_on_the_same_queries_and_keys(
    name: str, tmp_path: Path
) -> None:
    trace = recorded(architectures.model(name).bfloat16(), tmp_path, Notes())
    assert trace.spec.dtype == "bfloat16"
    table = trace.table("attention")
    for layer in trace.spec.layers:
        blocks = trace.attention_inputs(trace.sequence_ids[0], layer=layer.index)
        query, key = (to_torch(blocks[kind].data, blocks[kind].dtype) for kind in ("query", "key"))
        assert query.dtype == torch.bfloat16
        num_rows = query.shape[1]
        seen = visible_QK(layer, num_rows, num_rows, first_query=0)
        scores = logits_HQK(query.double(), key.double(), layer).masked_fill(~seen, -torch.inf)
        weights = weights_HQK(scores, layer)
        shares = weights / weights.sum(-1, keepdim=True)
        rows = table[table["layer"] == layer.index].sort_values(["head", "query"])
        truth = {
            "entropy_nats": -torch.special.xlogy(shares, shares).sum(-1),
            "sink_mass": weights[..., :SINK_KEYS].sum(-1),
        }
        for column, values in truth.items():
            ours = torch.tensor(rows[column].to_numpy()).reshape(values.shape)
            assert (ours - values).abs().max() < HALF_PRECISION_BOUND
