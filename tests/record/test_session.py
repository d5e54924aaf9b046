"""What the recorder makes of sources, batches and models that are not well."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests import architectures, tiny
from tests.record.test_recorder import assert_same_traces
from tracekit.errors import ModelError, UsageError
from tracekit.model.load import LoadedModel
from tracekit.model.read_spec import read_spec
from tracekit.record import capture as capture_module
from tracekit.record.options import RecordOptions
from tracekit.record.prompts import read_prompts
from tracekit.record.recorder import record
from tracekit.record.rendering import Rendering
from tracekit.record.sources.conversations import ConversationSource
from tracekit.record.sources.prompts import PromptSource
from tracekit.record.sources.text import TextSource
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from pathlib import Path

TEXT = (
    "the river kept its own calendar and the town had learned to read it; in the other "
    "season \U0001f31e the ferry went over at noon, and on the third day the rain began. "
) * 3


def loaded_of(model: Any) -> LoadedModel:
    spec = read_spec(model, name="tiny", num_tokens=len(tiny.tokenizer()))
    return LoadedModel(model=model, tokenizer=tiny.tokenizer(), spec=spec)


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


PROMPTS = [
    {"id": "long", "prompt": "the other thing on the river in the morning"},
    {"id": "short", "text": "x"},
    {"id": "middle", "prompt": "and then"},
    {"id": "turns", "turns": ["in", "on"]},
    {"id": "few", "text": "the end", "max_new_tokens": 2},
]


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss", "qwen3_next", "gemma3n", "mixtral"]
)
@pytest.mark.parametrize("pending", [1 << 20, 3000])
def test_a_batch_gives_the_steps_of_single_runs(
    tmp_path: Path, family: str, pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of(architectures.model(family))
    prompts = written(tmp_path / "p.jsonl", *PROMPTS)
    options = {"max_new_tokens": 7, "attention_topk": 3}
    record(loaded, prompts, tmp_path / "single", RecordOptions(**options))
    monkeypatch.setattr(capture_module, "PENDING_BYTES", pending)
    record(loaded, prompts, tmp_path / "batch", RecordOptions(**options, batch_size=4))
    single, batch = Trace(tmp_path / "single"), Trace(tmp_path / "batch")
    assert not validate(tmp_path / "batch").problems
    assert sorted(single.sequence_ids) == sorted(batch.sequence_ids)
    for name in ("tokens", "steps", "attention", "keys"):
        frames = [sorted_frame(trace, name) for trace in (single, batch)]
        pd.testing.assert_frame_equal(*frames, rtol=1e-4, atol=1e-4)
    for sequence_id in single.sequence_ids:
        for layer in single.stored_layers(sequence_id):
            mine, theirs = (one.attention_inputs(sequence_id, layer) for one in (single, batch))
            for kind, block in mine.items():
                np.testing.assert_allclose(block.data, theirs[kind].data, atol=1e-4, rtol=1e-4)


def sorted_frame(trace: Trace, name: str) -> pd.DataFrame:
    """Return a table without what the clock, and the bytes of a shared cache, make of it."""
    frame = trace.table(name)
    frame["sequence_id"] = frame["sequence_id"].astype(str)
    keys = ["sequence_id", "layer", "head", "kv_head", "query", "key", "position"]
    by = [key for key in keys if key in frame]
    # Near ties, and counts at a threshold, may fall either way.
    loose = ["wall_s", "top_ids", "top_keys", "top_logprobs", "rank", "reads", "last_read"]
    loose += [f"effective_support_{percent}" for percent in (90, 95, 99)] + ["kv_bytes"]
    frame = frame.sort_values(by).reset_index(drop=True)
    return frame.drop(columns=[one for one in loose if one in frame])


def test_padding_is_in_no_entry_and_no_byte_of_the_cache(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model())
    prompts = written(tmp_path / "p.jsonl", *PROMPTS)
    for name, size in (("single", 1), ("batch", 4)):
        record(loaded, prompts, tmp_path / name, RecordOptions(max_new_tokens=7, batch_size=size))
    frames = []
    for name in ("single", "batch"):
        frame = Trace(tmp_path / name).table("kv")
        frame["sequence_id"] = frame["sequence_id"].astype(str)
        by = ["sequence_id", "position", "layer"]
        frames.append(frame.sort_values(by).reset_index(drop=True))
    columns = ["sequence_id", "position", "layer", "entries", "logical_bytes"]
    pd.testing.assert_frame_equal(frames[0][columns], frames[1][columns])


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_prompt_in_chunks_gives_the_same_trace(
    tmp_path: Path, family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of(architectures.model(family))
    prompts = written(tmp_path / "p.jsonl", PROMPTS[0], PROMPTS[3])
    options = {"max_new_tokens": 5}
    record(loaded, prompts, tmp_path / "whole", RecordOptions(**options))
    monkeypatch.setattr(capture_module, "PENDING_BYTES", 3000)
    record(loaded, prompts, tmp_path / "chunks", RecordOptions(**options, prefill_chunk=chunk))
    frames = [sorted_frame(Trace(tmp_path / name), "steps") for name in ("whole", "chunks")]
    pd.testing.assert_frame_equal(*frames, rtol=1e-4, atol=1e-4)
    frames = [sorted_frame(Trace(tmp_path / name), "attention") for name in ("whole", "chunks")]
    pd.testing.assert_frame_equal(*frames, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(None, None), (40, None), (40, 13), (40, 39)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_each_token_of_a_text_is_scored_once_with_its_context(
    tmp_path: Path, window: int | None, stride: int | None, batch_size: int
) -> None:
    loaded = loaded_of(tiny.model())
    path = tmp_path / "river.txt"
    path.write_text(TEXT, encoding="utf-8")
    source = TextSource(str(path), window=window, stride=stride)
    record(loaded, source, tmp_path / "t", RecordOptions(batch_size=batch_size))
    assert not validate(tmp_path / "t").problems
    trace = Trace(tmp_path / "t")
    ids = tiny.tokenizer()(TEXT, add_special_tokens=False).input_ids
    seen: dict[int, float] = {}
    for _, sequence in trace.sequences.iterrows():
        assert sequence["text_source"] == "given"
        assert sequence["finish_reason"] == "given"
        assert pd.isna(sequence["prompt_end"])
        start = 0 if pd.isna(sequence["text_start"]) else int(sequence["text_start"])
        own = ids[start : start + int(sequence["num_tokens"])]
        logits = loaded.model(torch.tensor([own])).logits[0].double().log_softmax(-1)
        steps = trace.table("steps", sequence_id=sequence["sequence_id"])
        assert steps["position"].tolist() == list(range(1, len(own)))
        for _, step in steps[steps["is_scored"]].iterrows():
            place = start + int(step["position"])
            assert place not in seen
            seen[place] = step["surprisal_nats"]
            wanted = -logits[int(step["position"]) - 1, ids[place]].item()
            assert seen[place] == pytest.approx(wanted, abs=1e-4)
    assert sorted(seen) == list(range(1, len(ids)))


def test_a_recorded_conversation_is_scored_whole_and_keeps_its_turns(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model())
    messages = [
        {"role": "user", "content": "where is the ferry <|im_end|>"},
        {"role": "assistant", "content": "on the other side"},
        {"role": "user", "content": "and then?"},
        {"role": "assistant", "content": "in the river"},
    ]
    path = written(tmp_path / "c.jsonl", {"id": "one", "messages": messages})
    record(loaded, ConversationSource(path), tmp_path / "t")
    trace = Trace(tmp_path / "t")
    row = trace.sequences.iloc[0]
    tokens = trace.table("tokens", sequence_id=row["sequence_id"])
    assert row["text_source"] == "given"
    assert not tokens["is_generated"].any()
    assert tokens["turn"].unique().tolist() == [0, 1, 2, 3]
    said = tokens[(tokens["turn"] == 1) & ~tokens["is_template"]]["token_id"].tolist()
    assert tiny.tokenizer().decode(said) == "on the other side"
    # The special token that the user spelled is plain words; the template's four are not.
    assert (tokens["token_id"] == 2).sum() == 4
    first = tokens[(tokens["turn"] == 1) & ~tokens["is_template"]]["position"].min()
    assert row["prompt_end"] == first
    assert trace.table("steps")["is_scored"].all()


def test_no_new_tokens_record_the_prompt_alone(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model())
    prompts = written(tmp_path / "p.jsonl", *PROMPTS)
    done = record(loaded, prompts, tmp_path / "t", RecordOptions(max_new_tokens=0, batch_size=2))
    trace = Trace(tmp_path / "t")
    assert [one.prompt for one in done.skipped] == ["short"]
    assert "none to predict" in done.skipped[0].why
    assert not trace.table("tokens")["is_generated"].any()
    assert set(trace.sequences["finish_reason"]) == {"given"}
    assert not validate(tmp_path / "t").problems


def test_samples_of_a_prompt_differ_and_do_not_hang_on_the_batch(tmp_path: Path) -> None:
    from tracekit.record.sampler import Sampler

    loaded = loaded_of(tiny.model())
    file = read_prompts(written(tmp_path / "p.jsonl", PROMPTS[0], PROMPTS[2]))
    sampler = Sampler(temperature=1.4)
    texts = []
    for name, size in (("a", 1), ("b", 4)):
        options = RecordOptions(max_new_tokens=8, sampler=sampler, batch_size=size)
        record(loaded, PromptSource(file, samples=3), tmp_path / name, options)
        tokens = Trace(tmp_path / name).table("tokens")
        ids = tokens["sequence_id"].astype(str)
        texts.append({name: own["token_id"].tolist() for name, own in tokens.groupby(ids)})
    assert texts[0] == texts[1]
    assert set(texts[0]) == {f"{name}#{n}" for name in ("long", "middle") for n in range(3)}
    assert len({tuple(own) for own in texts[0].values()}) == 6


def test_a_template_that_would_give_other_ids_is_flagged(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model())
    prompts = written(tmp_path / "p.jsonl", PROMPTS[3], PROMPTS[2])
    record(loaded, prompts, tmp_path / "t", RecordOptions(max_new_tokens=6))
    flags = Trace(tmp_path / "t").sequences.set_index("prompt_id")["rerender_agrees"]
    assert flags["middle"] is None or pd.isna(flags["middle"])
    assert flags["turns"] in (True, False)


def test_maps_and_largest_entries_are_those_of_eager_attention(tmp_path: Path) -> None:
    model = tiny.model()
    loaded = loaded_of(model)
    prompts = written(tmp_path / "p.jsonl", PROMPTS[0], PROMPTS[1])
    options = RecordOptions(max_new_tokens=6, capture="hidden", maps=(1, -1), attention_topk=5)
    record(loaded, prompts, tmp_path / "t", options)
    assert not validate(tmp_path / "t").problems
    trace = Trace(tmp_path / "t")
    eager = tiny.model()
    eager.set_attn_implementation("eager")
    for sequence_id in trace.sequence_ids:
        ids = trace.table("tokens", sequence_id=sequence_id)["token_id"].tolist()
        maps = eager(torch.tensor([ids[:-1]]), output_attentions=True).attentions
        for layer in (1, 3):
            stored = trace.attention_map(sequence_id, layer)
            assert stored.dtype == np.float16
            wanted = maps[layer][0].detach().numpy()
            np.testing.assert_allclose(stored, wanted, atol=1e-3)
        with pytest.raises(UsageError, match="--maps"):
            trace.attention_map(sequence_id, 0)
        rows = trace.table("attention", sequence_id=sequence_id)
        one = rows[(rows["layer"] == 0) & (rows["head"] == 2)].iloc[-1]
        wanted = maps[0][0, 2, -1].detach().numpy()
        np.testing.assert_allclose(one["top_weights"], wanted[one["top_keys"]], atol=1e-5)
        assert one["rest_mass"] == pytest.approx(1 - sum(one["top_weights"]), abs=1e-5)
        assert len(one["top_keys"]) == min(5, len(ids) - 1)


def test_a_layer_without_attention_gives_no_map(tmp_path: Path) -> None:
    loaded = loaded_of(architectures.model("qwen3_next"))
    prompts = written(tmp_path / "p.jsonl", PROMPTS[0])
    with pytest.raises(UsageError, match="no attention that can be seen in layer 0"):
        record(loaded, prompts, tmp_path / "t", RecordOptions(maps=(0,)))
    record(loaded, prompts, tmp_path / "t", RecordOptions(maps="all", max_new_tokens=2))
    assert Trace(tmp_path / "t").manifest["settings"]["maps"] == [1, 3]


def overflowing(layer: int) -> Any:
    """Return a float16 model in which the output of one layer is too large for the type."""
    model = tiny.model().half()
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight *= 1e4
        model.model.layers[layer].mlp.up_proj.weight *= 1e4
    return model


@pytest.mark.parametrize("capture", ["steps", "qkv"])
def test_an_overflow_names_its_first_layer_and_position_and_the_others_go_on(
    tmp_path: Path, capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of(tiny.model().half())
    prompts = written(tmp_path / "p.jsonl", PROMPTS[0], PROMPTS[2])
    broken = overflowing(1)
    bad = LoadedModel(model=broken, tokenizer=loaded.tokenizer, spec=loaded.spec)
    options = RecordOptions(max_new_tokens=4, capture=capture)
    done = record(bad, prompts, tmp_path / "t", options)
    assert done.num_sequences == 0
    assert [one.prompt for one in done.skipped] == ["long#0", "middle#0"]
    assert "layer 2 computed in float16 first held NaN or infinity" in done.skipped[0].why
    assert "bfloat16" in done.skipped[0].why


def test_ids_that_the_model_has_no_embedding_for_are_refused(tmp_path: Path) -> None:
    model = tiny.model(vocab_size=200)
    prompts = written(tmp_path / "p.jsonl", {"text": "\U0001f31e"}, {"text": "!!"})
    loaded = loaded_of(model)
    done = record(loaded, prompts, tmp_path / "t", RecordOptions(max_new_tokens=2))
    assert done.num_sequences == 1
    assert "the model has 200 embeddings" in done.skipped[0].why


def test_beyond_the_trained_length_is_said_and_flagged(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model(max_position_embeddings=24))
    prompts = written(
        tmp_path / "p.jsonl", {"id": "a", "text": "x"}, {"id": "b", "text": "y z" * 9}
    )
    record(loaded, prompts, tmp_path / "t", RecordOptions(max_new_tokens=5))
    flags = Trace(tmp_path / "t").sequences.set_index("prompt_id")["beyond_trained"]
    assert flags.to_dict() == {"a": False, "b": True}


def test_raw_prompts_go_through_no_template(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model())
    file = read_prompts(written(tmp_path / "p.jsonl", *PROMPTS))
    source = PromptSource(file, Rendering(format="raw"))
    record(loaded, source, tmp_path / "t", RecordOptions(max_new_tokens=2))
    trace = Trace(tmp_path / "t")
    assert trace.manifest["settings"]["format"] == "raw"
    tokens = trace.table("tokens")
    assert not tokens[~tokens["is_generated"]]["token_id"].isin([0, 1, 2]).any()


def test_a_batch_recorded_twice_is_the_same(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model())
    prompts = written(tmp_path / "p.jsonl", *PROMPTS)
    for name in ("a", "b"):
        record(loaded, prompts, tmp_path / name, RecordOptions(max_new_tokens=5, batch_size=3))
    assert_same_traces(Trace(tmp_path / "a"), Trace(tmp_path / "b"))


def test_a_model_without_a_padding_token_runs_in_batches(tmp_path: Path) -> None:
    model = tiny.model(pad_token_id=None, eos_token_id=None)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    loaded = loaded_of(model)
    prompts = written(tmp_path / "p.jsonl", *PROMPTS[:3])
    for name, size in (("single", 1), ("batch", 3)):
        record(loaded, prompts, tmp_path / name, RecordOptions(max_new_tokens=5, batch_size=size))
    frames = [sorted_frame(Trace(tmp_path / name), "steps") for name in ("single", "batch")]
    pd.testing.assert_frame_equal(*frames, rtol=1e-4, atol=1e-4)
    assert len(frames[0])


def test_a_larger_limit_goes_on_with_a_recording(tmp_path: Path) -> None:
    loaded = loaded_of(tiny.model())
    file = read_prompts(written(tmp_path / "p.jsonl", *PROMPTS))
    for limit in (1, 3):
        source = PromptSource(file, limit=limit)
        done = record(loaded, source, tmp_path / "t", RecordOptions(max_new_tokens=2))
        assert done.num_sequences == limit
    assert done.num_new == 2


def test_a_layer_that_attends_otherwise_than_its_spec_says_stops_the_recording(
    tmp_path: Path,
) -> None:
    loaded = loaded_of(tiny.model())
    first, *others = loaded.spec.layers
    layers = (replace(first, scale=2 * first.scale), *others)
    wrong = replace(loaded, spec=replace(loaded.spec, layers=layers))
    prompts = written(tmp_path / "p.jsonl", PROMPTS[0])
    with pytest.raises(ModelError, match="layer 0 of tiny does not attend as its spec says"):
        record(wrong, prompts, tmp_path / "t", RecordOptions(max_new_tokens=2))
