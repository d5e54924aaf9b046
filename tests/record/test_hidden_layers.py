"""Hidden states of layers in a trace: those of the model, whatever the way to them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests import architectures, tiny
from tests.model.test_norm import model_of
from tests.record.test_estimate import assert_close
from tests.record.test_session import PROMPTS, loaded_of, written
from tests.trace.test_validate import change
from tracekit.errors import InputError, ModelError, TraceError, UsageError
from tracekit.measure.norm import Norm
from tracekit.measure.tensors import to_torch
from tracekit.record import capture as capture_module
from tracekit.record import lane as lane_module
from tracekit.record.dry_run import estimate
from tracekit.record.layer_choice import decoder_layers, parse_layers
from tracekit.record.options import RecordOptions
from tracekit.record.prompts import read_prompts
from tracekit.record.recorder import record
from tracekit.record.rendering import Rendering
from tracekit.record.sources.prompts import PromptSource
from tracekit.record.sources.text import TextSource
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LAYERS = (0, 2, 3)


FEW = (PROMPTS[0], PROMPTS[3])
"""A prompt, and one of two turns."""


def recorded(model: Any, folder: Path, *, prompts: Sequence[Any] = FEW, **options: Any) -> Trace:
    """Record prompts, and see that the trace is whole."""
    chosen = RecordOptions(**{"max_new_tokens": 6, "hidden_layers": LAYERS, **options})
    record(loaded_of(model), written(folder / "p.jsonl", *prompts), folder / "t", chosen)
    assert validate(folder / "t").problems == ()
    return Trace(folder / "t")


def states(trace: Trace, sequence_id: str, layer: int) -> torch.Tensor:
    block = trace.residual(sequence_id, layer)
    return to_torch(block.data, block.dtype)


def check(trace: Trace, model: Any, *, atol: float = 1e-5) -> None:
    """Compare with what one pass of the model itself returns, and the last layer with the head's."""
    assert trace.spec.norm is not None
    norm = Norm.load(trace.weights_path, trace.spec.norm)
    for sequence_id in trace.sequence_ids:
        ids = trace.table("tokens", sequence_id=sequence_id)["token_id"].tolist()
        with torch.no_grad():
            wanted = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        for layer in (0, 2):
            ours = states(trace, sequence_id, layer)
            torch.testing.assert_close(ours, wanted[layer + 1][0], rtol=1e-4, atol=atol)
        hidden = trace.hidden(sequence_id)
        lens = norm.apply(states(trace, sequence_id, 3))
        torch.testing.assert_close(
            lens.float(), to_torch(hidden.data, hidden.dtype), rtol=1e-4, atol=atol
        )


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("pending", [1 << 20, 3000])
def test_residuals_are_the_models_own(
    tmp_path: Path, batch_size: int, pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "PENDING_BYTES", pending)
    monkeypatch.setattr(lane_module, "BLOCK_BYTES", pending)
    model = model_of("llama")
    trace = recorded(model, tmp_path, prompts=PROMPTS, batch_size=batch_size, prefill_chunk=5)
    assert trace.residual_layers == LAYERS
    assert trace.manifest["settings"]["hidden_layers"] == list(LAYERS)
    check(trace, model)


@pytest.mark.parametrize(
    "family", ["gpt2", "qwen3", "gemma2", "falcon", "cohere", "olmo2", "qwen3_next"]
)
def test_the_norm_of_the_last_layers_residual_is_the_final_hidden_state(
    tmp_path: Path, family: str
) -> None:
    model = model_of(family)
    check(recorded(model, tmp_path, prompts=PROMPTS[:2], batch_size=2), model, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba", "falcon alibi"])
def test_layers_that_cannot_be_replayed_have_residuals_all_the_same(
    tmp_path: Path, family: str
) -> None:
    trace = recorded(model_of(family), tmp_path, hidden_layers="all")
    assert trace.residual_layers == (0, 1, 2, 3)
    assert trace.stored_layers(trace.sequence_ids[0]) == []


def test_residuals_beside_queries_and_keys_change_neither(tmp_path: Path) -> None:
    model = model_of("llama")
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    both = recorded(model, tmp_path / "with")
    plain = recorded(model, tmp_path / "without", hidden_layers=())
    assert plain.residual_layers == ()
    for sequence_id in both.sequence_ids:
        ids = [
            t.table("tokens", sequence_id=sequence_id)["token_id"].tolist() for t in (both, plain)
        ]
        assert ids[0] == ids[1]
        for layer in range(4):
            mine, theirs = (t.attention_inputs(sequence_id, layer) for t in (both, plain))
            assert list(mine) == ["query", "key", "value"] == list(theirs)
            assert all(np.array_equal(mine[kind].data, theirs[kind].data) for kind in mine)


def test_the_hidden_level_and_the_influence_level_hold_them_too(tmp_path: Path) -> None:
    model = model_of("llama")
    for capture in ("hidden", "influence"):
        (tmp_path / capture).mkdir()
        check(recorded(model, tmp_path / capture, capture=capture), model)


def test_given_text_has_them_at_all_its_positions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the river kept its own calendar and the town had learned it")
    model = model_of("llama")
    options = RecordOptions(hidden_layers=LAYERS, batch_size=2)
    source = TextSource(str(tmp_path / "a.txt"), window=20, stride=10)
    record(loaded_of(model), source, tmp_path / "t", options)
    assert validate(tmp_path / "t").problems == ()
    check(Trace(tmp_path / "t"), model)


@pytest.mark.parametrize(
    ("dtype", "dtype_store", "stored"),
    [
        (torch.bfloat16, "native", "bfloat16"),
        (torch.float32, "float16", "float16"),
        (torch.float32, "bfloat16", "bfloat16"),
    ],
)
def test_types_are_those_of_queries_and_keys(
    tmp_path: Path, dtype: torch.dtype, dtype_store: str, stored: str
) -> None:
    trace = recorded(model_of("llama", dtype), tmp_path, dtype_store=dtype_store)
    for sequence_id in trace.sequence_ids:
        assert trace.residual(sequence_id, 2).dtype == stored
        assert trace.attention_inputs(sequence_id, 2)["query"].dtype == stored


def test_numbers_that_are_not_finite_are_named_by_their_layer(tmp_path: Path) -> None:
    model = model_of("llama")
    model.model.layers[2].mlp.down_proj.weight.data.fill_(torch.inf)
    options = RecordOptions(max_new_tokens=2, hidden_layers=(2,))
    # The spec cannot be read from such a model; the one of its sound twin stands for it.
    loaded = loaded_of(model_of("llama"))
    loaded.model.load_state_dict(model.state_dict())
    done = record(loaded, written(tmp_path / "p.jsonl", PROMPTS[0]), tmp_path / "t", options)
    assert "layer 2 computed in float32 first held NaN or infinity" in done.skipped[0].why


def test_numbers_too_large_for_the_type_of_storage_are_named(tmp_path: Path) -> None:
    model = model_of("llama")
    model.get_input_embeddings().weight.data *= 1e8
    prompts = written(tmp_path / "p.jsonl", PROMPTS[0])
    for dtype_store in ("float16", "bfloat16"):
        options = RecordOptions(max_new_tokens=2, hidden_layers=(2,), dtype_store=dtype_store)
        done = record(loaded_of(model), prompts, tmp_path / dtype_store, options)
        told = " ".join(one.why for one in done.skipped)
        assert ("layer 2 computed in float32 and stored in float16" in told) == bool(told)
        assert bool(told) == (dtype_store == "float16")


def test_a_listed_layer_counts_once_and_in_order() -> None:
    spec = loaded_of(tiny.model()).spec
    choice = parse_layers("--hidden-layers", "2-3,0,-1,-4")
    assert decoder_layers("hidden_layers", choice, spec) == (0, 2, 3)
    with pytest.raises(UsageError, match=r"no layer -5; it has layers 0 to 3\."):
        decoder_layers("hidden_layers", (-5,), spec)
    with pytest.raises(UsageError, match="'3-1' names no layers"):
        parse_layers("--hidden-layers", "3-1")


def test_what_cannot_be_recorded_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hidden_layers needs capture hidden or more"):
        RecordOptions(capture="steps", hidden_layers=(0,))
    prompts = written(tmp_path / "p.jsonl", PROMPTS[0])
    options = RecordOptions(hidden_layers=(4,))
    with pytest.raises(UsageError, match="no layer 4; it has layers 0 to 3"):
        record(loaded_of(tiny.model()), prompts, tmp_path / "t", options)
    streams, options = loaded_of(architectures.model("gemma3n")), RecordOptions(hidden_layers=(0,))
    with pytest.raises(ModelError, match="no norm that is understood"):
        record(streams, prompts, tmp_path / "t", options)
    with pytest.raises(ModelError, match="no norm that is understood"):
        estimate(streams, PromptSource(read_prompts(prompts), Rendering()), options)
    assert not (tmp_path / "t").exists()


def test_a_recording_goes_on_with_the_same_layers_only(tmp_path: Path) -> None:
    model = model_of("llama")
    recorded(model, tmp_path)
    assert len(recorded(model, tmp_path).sequence_ids) == len(FEW)
    with pytest.raises(InputError, match=r"hidden_layers is \[0, 1\], was \[0, 2, 3\]"):
        recorded(model, tmp_path, hidden_layers=(0, 1))


def test_the_reader_names_what_is_stored(tmp_path: Path, trace_folder: Path) -> None:
    trace = recorded(model_of("llama"), tmp_path)
    with pytest.raises(UsageError, match=r"of layers 0, 2, 3, so none of layer 1; .*-layers 1\."):
        trace.residual(trace.sequence_ids[0], 1)
    with pytest.raises(UsageError, match="sequence"):
        trace.residual("nobody", 2)
    plain = Trace(trace_folder)
    assert plain.residual_layers == ()
    with pytest.raises(UsageError, match="of no layer, so none of layer 1"):
        plain.residual(plain.sequence_ids[0], 1)


def test_the_estimate_counts_them(tmp_path: Path) -> None:
    recorded(tiny.model(), tmp_path, dtype_store="float16", max_new_tokens=40)
    assert_close(
        tmp_path / "t", capture="qkv", dtype_store="float16", head="store", residual_layers=LAYERS
    )


def test_a_missing_layer_and_one_that_is_not_finite_are_found(tmp_path: Path) -> None:
    recorded(tiny.model(), tmp_path)
    copies = [shutil.copytree(tmp_path / "t", tmp_path / name) for name in ("lost", "bad")]
    rows = pq.read_table(copies[0] / "shards" / "00000" / "tensors.parquet")
    kinds, layers = rows["kind"].to_pylist(), rows["layer"].to_pylist()
    at = [kind == "residual" and layer == 2 for kind, layer in zip(kinds, layers, strict=True)]
    lost = [1 if one else layer for one, layer in zip(at, layers, strict=True)]
    bad = [
        b"\xff" * len(data) if one else data
        for one, data in zip(at, rows["data"].to_pylist(), strict=True)
    ]

    change(copies[0], "tensors", "layer", pa.array(lost))
    change(copies[1], "tensors", "data", pa.array(bad, pa.large_binary()))
    told = [{one.what for one in validate(copy).problems} for copy in copies]
    assert any("no residual of layer 2 of long#0" in what for what in told[0])
    assert told[1] == {"tensors: hidden states of layer 2 are not all finite"}


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_input_embedding_comes_back(tmp_path: Path, is_tied: bool) -> None:
    model = tiny.model(tie_word_embeddings=is_tied)
    block = recorded(model, tmp_path).embedding()
    assert torch.equal(to_torch(block.data, block.dtype), model.get_input_embeddings().weight)


def test_a_trace_without_weights_has_no_embedding(tmp_path: Path) -> None:
    trace = recorded(tiny.model(), tmp_path, head="omit")
    with pytest.raises(TraceError, match="no input embedding; record with --head store"):
        trace.embedding()


def test_the_command_takes_layers_and_show_names_them(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracekit.cli.app import app

    prompts = written(tmp_path / "p.jsonl", *PROMPTS[:2])
    flags = ["record", "--model", str(model_folder), "--prompts", prompts, "--max-new-tokens", "2"]
    flags += ["--capture", "hidden", "-o", str(tmp_path / "t"), "--progress", "none"]
    app([*flags, "--hidden-layers", "0-1,-1", "--dry-run", "--json"], standalone_mode=False)
    more = json.loads(capsys.readouterr().out)["num_bytes"]["tensors.parquet"]
    app([*flags, "--dry-run", "--json"], standalone_mode=False)
    assert more > json.loads(capsys.readouterr().out)["num_bytes"]["tensors.parquet"]
    app([*flags, "--hidden-layers", "0-1,-1"], standalone_mode=False)
    app(["show", str(tmp_path / "t")], standalone_mode=False)
    assert "hidden states that leave layers 0, 1, 3" in capsys.readouterr().out
