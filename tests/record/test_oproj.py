"""Output projections in a trace: what goes in comes out, and what cannot is said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import architectures, tiny
from tests.record.test_estimate import assert_close
from tracekit.errors import UsageError
from tracekit.measure.tensors import to_torch
from tracekit.model.load import LoadedModel
from tracekit.model.oproj import output_projections
from tracekit.model.read_spec import read_spec
from tracekit.progress import Silent
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from pathlib import Path


class Notes(Silent):
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def say(self, text: str) -> None:
        """Keep it."""
        self.told.append(text)


def load(model: Any) -> LoadedModel:
    tokenizer = tiny.tokenizer()
    spec = read_spec(model, name="x", num_tokens=len(tokenizer))
    return LoadedModel(model=model, tokenizer=tokenizer, spec=spec)


def recorded(model: Any, folder: Path, **options: Any) -> tuple[Trace, list[str]]:
    """Record one prompt; return the trace and what was said."""
    prompts = folder / "some.jsonl"
    prompts.write_text(json.dumps({"id": "a", "text": "on the river"}), encoding="utf-8")
    notes = Notes()
    chosen = RecordOptions(max_new_tokens=2, store_oproj=True, **options)
    record(load(model), str(prompts), folder / "trace", chosen, progress=notes)
    assert validate(folder / "trace").problems == ()
    return Trace(folder / "trace"), notes.told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_projections_come_back_bit_for_bit(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = architectures.model(family).to(dtype)
    trace, told = recorded(model, tmp_path)
    assert told == []
    assert trace.has_head
    assert trace.manifest["settings"]["store_oproj"] is True
    for layer, projection in output_projections(model, trace.spec).items():
        stored = trace.output_projection(layer)
        assert stored is not None
        weight, bias = stored
        assert torch.equal(to_torch(weight.data, weight.dtype), projection.weight)
        if projection.bias_E is None:
            assert bias is None
        else:
            assert bias is not None
            assert torch.equal(to_torch(bias.data, bias.dtype), projection.bias_E)
    with pytest.raises(UsageError, match="no layer 4"):
        trace.output_projection(4)


def test_projections_are_stored_without_the_head(tmp_path: Path) -> None:
    trace, _ = recorded(tiny.model(), tmp_path, head="omit")
    assert not trace.has_head
    assert trace.output_projection(0) is not None


def test_layers_without_a_projection_are_named(tmp_path: Path) -> None:
    model = tiny.model()
    model.model.layers[2].self_attn.o_proj.register_forward_pre_hook(lambda _, args: args[0] * 2)
    trace, told = recorded(model, tmp_path)
    assert [bool(trace.output_projection(layer)) for layer in range(4)] == [True, True, False, True]
    [note] = told
    assert "output projections of layers 2 are not stored" in note


def test_layers_may_share_a_projection(tmp_path: Path) -> None:
    model = tiny.model()
    layers = model.model.layers
    layers[3].self_attn.o_proj.weight = layers[0].self_attn.o_proj.weight
    trace, _ = recorded(model, tmp_path)
    first, last = trace.output_projection(0), trace.output_projection(3)
    assert first is not None
    assert last is not None
    assert (first[0].data == last[0].data).all()


def test_the_estimate_counts_projections(tmp_path: Path) -> None:
    recorded(tiny.model(), tmp_path, head="omit")
    assert_close(
        tmp_path / "trace", capture="qkv", dtype_store="native", head="omit", store_oproj=True
    )


def test_an_ordinary_trace_has_none(trace_folder: Path) -> None:
    trace = Trace(trace_folder)
    assert trace.has_head
    assert all(trace.output_projection(layer) is None for layer in range(4))


def test_projections_need_queries_keys_and_values() -> None:
    with pytest.raises(UsageError, match="store_oproj needs capture qkv, not hidden"):
        RecordOptions(capture="hidden", store_oproj=True)
