from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests import tiny
from tests.conftest import NEW_TOKENS
from tracekit.errors import InputError, UsageError
from tracekit.measure.tensors import to_torch
from tracekit.model.load import load_model
from tracekit.record import capture as capture_module
from tracekit.record import lane as lane_module
from tracekit.record import strips as strips_module
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.record.sampler import Sampler
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.model.load import LoadedModel


def eager_maps(model_folder: Path, ids: list[int]) -> Any:
    """Return attention maps and logits of one eager pass over the ids that went through."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), output_attentions=True)


def test_recording_changes_no_token(model_folder: Path, trace_folder: Path) -> None:
    trace = Trace(trace_folder)
    model = tiny.model()
    for _, sequence in trace.sequences.iterrows():
        if sequence["prompt_id"] == "turns":
            continue
        tokens = trace.table("tokens", sequence_id=sequence["sequence_id"])["token_id"].tolist()
        prompt = torch.tensor([tokens[: sequence["prompt_end"]]])
        plain = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        assert plain[0].tolist() == tokens


def test_entropy_from_hidden_states_is_that_of_the_models_logits(
    model_folder: Path, trace_folder: Path
) -> None:
    trace = Trace(trace_folder)
    for sequence_id in trace.sequence_ids:
        ids = trace.table("tokens", sequence_id=sequence_id)["token_id"].tolist()
        logits = eager_maps(model_folder, ids[:-1]).logits[0].double().log_softmax(-1)
        steps = trace.table("steps", sequence_id=sequence_id)
        entropy = -(logits.exp() * logits).sum(-1)
        surprisal = -logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        np.testing.assert_allclose(steps["entropy_nats"], entropy, atol=1e-5)
        np.testing.assert_allclose(steps["surprisal_nats"], surprisal, atol=1e-5)


def test_attention_statistics_are_those_of_eager_maps(
    model_folder: Path, trace_folder: Path
) -> None:
    trace = Trace(trace_folder)
    for sequence_id in trace.sequence_ids:
        ids = trace.table("tokens", sequence_id=sequence_id)["token_id"].tolist()
        maps = torch.stack(eager_maps(model_folder, ids[:-1]).attentions)[:, 0].double()
        rows = trace.table("attention", sequence_id=sequence_id)
        shape = maps.shape[:3]
        rows = rows.sort_values(["layer", "head", "query"])
        entropy = torch.special.entr(maps).sum(-1)
        np.testing.assert_allclose(
            rows["entropy_nats"].to_numpy().reshape(shape), entropy, atol=1e-5
        )
        sink = maps[..., :4].sum(-1)
        np.testing.assert_allclose(rows["sink_mass"].to_numpy().reshape(shape), sink, atol=1e-5)
        keys = trace.table("keys", sequence_id=sequence_id).sort_values(["layer", "kv_head", "key"])
        received = maps.sum(2).reshape(4, 2, 2, -1).sum(2)
        np.testing.assert_allclose(
            keys["mass_received"].to_numpy().reshape(received.shape), received, atol=1e-4
        )


@pytest.mark.parametrize("window", [None, 6])
def test_long_prompts_written_in_pieces_give_the_same_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    folder = tmp_path / "model"
    extra = {} if window is None else {"sliding_window": window}
    tiny.model("llama" if window is None else "mistral", **extra).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    loaded = load_model(str(folder))
    (tmp_path / "prompts.txt").write_text("the rain on the river in the morning\nx\n")
    options = RecordOptions(max_new_tokens=20)
    record(loaded, str(tmp_path / "prompts.txt"), tmp_path / "whole", options)
    monkeypatch.setattr(capture_module, "PENDING_BYTES", 2000)
    monkeypatch.setattr(lane_module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(strips_module, "BLOCK_ROWS", 3)
    record(loaded, str(tmp_path / "prompts.txt"), tmp_path / "pieces", options)
    assert not validate(tmp_path / "pieces").problems
    assert_same_traces(Trace(tmp_path / "whole"), Trace(tmp_path / "pieces"))


def assert_same_traces(one: Trace, other: Trace) -> None:
    """Compare all that does not depend on the clock or on where a block was cut."""
    pd.testing.assert_frame_equal(one.sequences, other.sequences)
    assert {**one.manifest, "run_id": 0, "created": 0, "command": 0} == {
        **other.manifest,
        "run_id": 0,
        "created": 0,
        "command": 0,
    }
    for name in ("tokens", "steps", "kv", "attention", "keys"):
        keys = ["sequence_id", "layer", "head", "kv_head", "query", "key", "position"]
        frames = []
        for trace in (one, other):
            frame = trace.table(name)
            frame["sequence_id"] = frame["sequence_id"].astype(str)
            by = [key for key in keys if key in frame]
            frame = frame.sort_values(by).reset_index(drop=True)
            frames.append(frame.drop(columns="wall_s", errors="ignore"))
        pd.testing.assert_frame_equal(*frames, rtol=1e-5, atol=1e-6)
    for sequence_id in one.sequence_ids:
        np.testing.assert_array_equal(one.hidden(sequence_id).data, other.hidden(sequence_id).data)
        for layer in one.stored_layers(sequence_id):
            mine, theirs = (t.attention_inputs(sequence_id, layer) for t in (one, other))
            for kind in mine:
                np.testing.assert_array_equal(mine[kind].data, theirs[kind].data)


def test_a_prompt_of_one_token_is_recorded(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "x"}\n')
    record(
        str(model_folder),
        str(tmp_path / "p.jsonl"),
        tmp_path / "t",
        RecordOptions(max_new_tokens=1),
    )
    trace = Trace(tmp_path / "t")
    assert trace.sequences["num_tokens"].tolist() == [2]
    assert not validate(tmp_path / "t").problems


def test_answers_are_fed_back_and_turns_are_marked(trace_folder: Path) -> None:
    trace = Trace(trace_folder)
    tokens = trace.table("tokens", sequence_id="turns#0")
    answers = tokens[tokens["is_generated"]]
    assert answers["turn"].unique().tolist() == [1, 3]
    ends = trace.sequences.set_index("sequence_id").loc["turns#0", "turn_ends"].tolist()
    assert len(ends) == 4
    assert ends[-1] == len(tokens)
    paths = trace.table("steps", sequence_id="turns#0")["path"].astype(str)
    assert (paths == "prefill").sum() > 10
    assert (paths == "decode").sum() == len(answers) - 2


def test_context_and_question_are_told_apart(trace_folder: Path) -> None:
    trace = Trace(trace_folder)
    row = trace.sequences.set_index("sequence_id").loc["asked#0"]
    tokens = trace.table("tokens", sequence_id="asked#0")
    assert 0 < row["context_end"] < row["prompt_end"] < row["num_tokens"]
    spans = tokens["span"].astype(object)
    assert (spans[: int(row["context_end"])].dropna() == "context").all()
    assert (spans[int(row["context_end"]) :].dropna() == "question").all()


def learned_positions(tmp_path: Path) -> LoadedModel:
    """Return a tiny GPT-2, which has 512 positions and no more."""
    folder = tmp_path / "gpt2"
    tiny.model("gpt2", num_key_value_heads=4).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return load_model(str(folder))


def test_bad_prompts_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    lines = ['{"prompt": "good"}', "{", json.dumps({"id": "long", "prompt": "x " * 600})]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    options = RecordOptions(max_new_tokens=2)
    done = record(learned_positions(tmp_path), str(tmp_path / "p.jsonl"), tmp_path / "t", options)
    assert done.num_sequences == 1
    assert [one.prompt for one in done.skipped] == ["line 2 of p.jsonl", "long"] or [
        one.prompt.endswith(("p.jsonl", "long")) for one in done.skipped
    ] == [True, True]
    assert "the model has 512 positions" in done.skipped[1].why


def test_sampling_is_repeated_by_its_seed(
    model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    texts = []
    for number, seed in enumerate((1, 1, 2)):
        options = RecordOptions(max_new_tokens=8, seed=seed, sampler=Sampler(temperature=1.5))
        record(str(model_folder), str(prompt_file), tmp_path / str(number), options)
        texts.append(Trace(tmp_path / str(number)).table("tokens")["token_id"].tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("capture", ["steps", "hidden"])
def test_smaller_captures_hold_what_they_say(
    model_folder: Path, prompt_file: Path, tmp_path: Path, capture: str
) -> None:
    options = RecordOptions(max_new_tokens=3, capture=capture)
    record(str(model_folder), str(prompt_file), tmp_path / "t", options)
    trace = Trace(tmp_path / "t")
    assert not validate(tmp_path / "t").problems
    files = {path.stem for path in trace.shards[0].iterdir()}
    expected = {"sequences", "tokens", "steps", "kv"}
    if capture == "hidden":
        expected |= {"attention", "keys", "tensors"}
        assert trace.stored_layers(trace.sequence_ids[0]) == []
    assert files == expected


def test_float16_storage_halves_the_tensors(
    model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    options = RecordOptions(max_new_tokens=3, dtype_store="float16")
    record(str(model_folder), str(prompt_file), tmp_path / "t", options)
    block = Trace(tmp_path / "t").attention_inputs("plain#0", 0)["key"]
    assert block.dtype == "float16"
    assert Trace(tmp_path / "t").hidden("plain#0").dtype == "float32"


def test_bfloat16_is_stored_bit_for_bit(
    model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(model_folder), dtype="bfloat16")
    record(loaded, str(prompt_file), tmp_path / "t", RecordOptions(max_new_tokens=3))
    trace = Trace(tmp_path / "t")
    block = trace.attention_inputs("plain#0", 0)["query"]
    assert block.dtype == "bfloat16"
    assert to_torch(block.data, block.dtype).dtype == torch.bfloat16
    assert not validate(tmp_path / "t").problems


def test_unknown_options_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match="unknown capture 'qvk'; did you mean 'qkv'"):
        RecordOptions(capture="qvk")
    with pytest.raises(UsageError, match="max_new_tokens must be at least 0"):
        RecordOptions(max_new_tokens=-1)
    with pytest.raises(UsageError, match="batch_size must be at least 1"):
        RecordOptions(batch_size=0)
    with pytest.raises(UsageError, match="capture steps has no attention"):
        RecordOptions(capture="steps", maps=(0,))
    for temperature in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="temperature"):
            Sampler(temperature=temperature)


def test_another_model_does_not_go_on_with_a_trace(
    trace_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    tiny.model(seed=5).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    with pytest.raises(InputError, match="fingerprint"):
        record(
            str(folder), str(prompt_file), trace_folder, RecordOptions(max_new_tokens=NEW_TOKENS)
        )
