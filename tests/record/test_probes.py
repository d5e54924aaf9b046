"""Influence probes in a trace: what is stored, from where, and what becomes of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests import architectures, tiny
from tests.conftest import NEW_TOKENS
from tests.record.test_crashes import assert_same, rows
from tracekit.cli.app import main
from tracekit.errors import InputError, ModelError, UsageError
from tracekit.live.gradients import influence
from tracekit.live.run import full_run
from tracekit.measure.tensors import to_torch
from tracekit.model.load import LoadedModel, load_model
from tracekit.model.read_spec import read_spec
from tracekit.progress import Silent
from tracekit.record import probes as probes_module
from tracekit.record.layer_choice import parse_layers
from tracekit.record.options import RecordOptions
from tracekit.record.probe_options import ProbeOptions
from tracekit.record.recorder import Recorded, record
from tracekit.record.seed import sequence_seed
from tracekit.simulate.plan import make_plan
from tracekit.simulate.refusals import refuse_impossible
from tracekit.trace import writer as writer_module
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_PROBES = 3


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    return load_model(str(model_folder))


def recorded(loaded: LoadedModel, prompts: Any, out: Path, **settings: Any) -> Recorded:
    """Record with probes; keywords of ``ProbeOptions`` and ``RecordOptions`` may be given."""
    names = ("number", "dtype", "layers", "start", "seed")
    own = {name: settings.pop(name) for name in names if name in settings}
    progress = settings.pop("progress", None)
    options = RecordOptions(
        capture="influence",
        probes=ProbeOptions(**({"number": NUM_PROBES} | own)),
        **({"max_new_tokens": NEW_TOKENS} | settings),
    )
    return record(loaded, str(prompts), out, options, progress=progress)


@pytest.fixture(scope="module")
def probed(
    tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel, prompt_file: Path
) -> Path:
    out = tmp_path_factory.mktemp("probed") / "trace"
    assert not recorded(loaded, prompt_file, out).skipped
    return out


def probes_of(trace: Trace, sequence_id: str, layer: int) -> torch.Tensor:
    found = trace.influence(sequence_id, layer)
    assert found is not None
    return to_torch(found[1].data, found[1].dtype)


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_what_is_read_back_are_the_gradients_of_the_sequence(
    loaded: LoadedModel, probed: Path
) -> None:
    trace = Trace(probed)
    assert not validate(probed).problems
    for _, sequence in trace.sequences.iterrows():
        name, first = str(sequence["sequence_id"]), int(sequence["probed_from"])
        ids = trace.table("tokens", sequence_id=name)["token_id"].tolist()
        seed = sequence_seed(0, f"{name} probes")
        run = full_run(loaded, ids[:-1])
        wanted = influence(run, first, num_probes=NUM_PROBES, seed=seed, layers=range(4))
        for layer, own_PHRD in wanted:
            found = trace.influence(name, layer)
            assert found is not None
            assert found[0] == first
            assert found[1].data.shape == (NUM_PROBES, 4, len(ids) - 1 - first, 8)
            assert torch.equal(to_torch(found[1].data, found[1].dtype), own_PHRD.bfloat16())


def test_rows_begin_after_the_context_else_the_prompt_else_half_of_the_text(
    loaded: LoadedModel, probed: Path, tmp_path: Path
) -> None:
    frame = Trace(probed).sequences.set_index("sequence_id")
    assert frame["probed_from"]["asked#0"] == frame["context_end"]["asked#0"]
    for name in ("plain#0", "turns#0", "raw#0"):
        assert frame["probed_from"][name] == frame["prompt_end"][name]
    from tracekit.record.rendering import Rendering
    from tracekit.record.sources.text import TextSource

    (tmp_path / "text.txt").write_text("the river in the morning")
    options = RecordOptions(capture="influence", probes=ProbeOptions(number=1))
    source = TextSource([str(tmp_path / "text.txt")], Rendering())
    record(loaded, source, tmp_path / "t", options)
    (one,) = Trace(tmp_path / "t").sequences.to_dict("records")
    assert one["probed_from"] == one["num_tokens"] // 2


@pytest.mark.parametrize(("start", "first"), [("20", 20), ("turn", None), ("0.25", None)])
def test_the_first_row_is_the_one_that_was_asked_for(
    loaded: LoadedModel, tmp_path: Path, start: str, first: int | None
) -> None:
    prompts = written(tmp_path / "p.jsonl", {"id": "turns", "turns": ["in the morning", "and?"]})
    recorded(loaded, prompts, tmp_path / "t", start=start)
    (one,) = Trace(tmp_path / "t").sequences.to_dict("records")
    wanted = {"turn": one["turn_ends"][0], "0.25": one["num_tokens"] // 4}.get(start, first)
    assert one["probed_from"] == wanted


def test_recording_probes_changes_nothing_else(probed: Path, trace_folder: Path) -> None:
    trace, plain = Trace(probed), Trace(trace_folder)
    own = ["probed_from"]
    assert plain.sequences[own].isna().all(axis=None)
    assert trace.sequences.drop(columns=own).equals(plain.sequences.drop(columns=own))
    for name in ("tokens", "steps", "kv", "attention", "keys"):
        assert rows(trace, name).equals(rows(plain, name))
    for name in trace.sequence_ids:
        np.testing.assert_array_equal(trace.hidden(name).data, plain.hidden(name).data)
        assert trace.stored_layers(name) == plain.stored_layers(name) == [0, 1, 2, 3]
        for layer in range(4):
            blocks, same = (one.attention_inputs(name, layer) for one in (trace, plain))
            assert set(blocks) == {"query", "key", "value"}
            for kind, block in blocks.items():
                np.testing.assert_array_equal(block.data, same[kind].data)
    assert plain.influence("plain#0", 0) is None
    refuse_impossible(trace, make_plan())


def test_a_batch_has_the_probes_of_single_runs(
    loaded: LoadedModel, prompt_file: Path, probed: Path, tmp_path: Path
) -> None:
    recorded(loaded, prompt_file, tmp_path / "t", batch_size=3, dtype="float32")
    trace, single = Trace(tmp_path / "t"), Trace(probed)
    for name in single.sequence_ids:
        own, other = (probes_of(one, name, 2).bfloat16() for one in (trace, single))
        assert torch.equal(own, other)


def test_layers_that_were_not_chosen_have_none(
    loaded: LoadedModel, prompt_file: Path, probed: Path, tmp_path: Path
) -> None:
    recorded(loaded, prompt_file, tmp_path / "t", layers=(1, -1))
    trace, whole = Trace(tmp_path / "t"), Trace(probed)
    assert trace.manifest["settings"]["probes"]["layers"] == [1, 3]
    assert not validate(tmp_path / "t").problems
    for name in trace.sequence_ids:
        assert trace.influence(name, 0) is None
        assert trace.influence(name, 2) is None
        for layer in (1, 3):
            assert torch.equal(probes_of(trace, name, layer), probes_of(whole, name, layer))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_stored_types_differ_by_rounding_alone(
    loaded: LoadedModel, prompt_file: Path, probed: Path, tmp_path: Path, dtype: str
) -> None:
    recorded(loaded, prompt_file, tmp_path / "t", dtype=dtype)
    assert not validate(tmp_path / "t").problems
    trace, half = Trace(tmp_path / "t"), Trace(probed)
    for name in trace.sequence_ids:
        own, other = probes_of(trace, name, 1), probes_of(half, name, 1)
        assert str(own.dtype) == f"torch.{dtype}"
        torch.testing.assert_close(own.float(), other.float(), rtol=1e-2, atol=1e-6)


def test_probes_written_in_pieces_are_read_as_one(
    loaded: LoadedModel,
    prompt_file: Path,
    probed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes_module, "BLOCK_BYTES", 500)
    recorded(loaded, prompt_file, tmp_path / "t")
    assert_same(Trace(probed), Trace(tmp_path / "t"))


def test_sequences_of_which_no_row_is_left_have_none(loaded: LoadedModel, tmp_path: Path) -> None:
    prompts = written(
        tmp_path / "p.jsonl", {"id": "one", "text": "x"}, {"id": "more", "prompt": "in the end"}
    )
    assert not recorded(loaded, prompts, tmp_path / "t", max_new_tokens=1).skipped
    trace = Trace(tmp_path / "t")
    assert trace.sequences[["probed_from", "unprobed"]].isna().all(axis=None)
    assert trace.influence("one#0", 0) is None
    assert not validate(tmp_path / "t").problems


def test_a_recording_stopped_between_two_layers_goes_on_to_the_same_trace(
    loaded: LoadedModel,
    prompt_file: Path,
    probed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "SHARD_SEQUENCES", 2)
    num_left = 4 * 3 + 2

    def stopping(*args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal num_left
        for step in influence(*args, **kwargs):
            num_left -= 1
            if num_left < 0:
                raise KeyboardInterrupt
            yield step

    with monkeypatch.context() as patch:
        patch.setattr(probes_module, "influence", stopping)
        with pytest.raises(KeyboardInterrupt):
            recorded(loaded, prompt_file, tmp_path / "t")
    assert Trace(tmp_path / "t").sequence_ids == Trace(probed).sequence_ids[:3]
    assert not validate(tmp_path / "t").problems
    recorded(loaded, prompt_file, tmp_path / "t")
    assert_same(Trace(probed), Trace(tmp_path / "t"))


def test_other_probes_are_other_settings(
    loaded: LoadedModel, prompt_file: Path, probed: Path
) -> None:
    with pytest.raises(InputError, match=r"other settings .probes is"):
        recorded(loaded, prompt_file, probed, seed=1)


class Listener(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_gradients_that_are_not_finite_leave_out_the_probes_alone(
    loaded: LoadedModel,
    prompt_file: Path,
    probed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_runs = 0

    def overflowing(*args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal num_runs
        num_runs += 1
        for layer, own_PHRD in influence(*args, **kwargs):
            yield layer, own_PHRD / (0 if num_runs == 2 and layer == 1 else 1)

    monkeypatch.setattr(probes_module, "influence", overflowing)
    listener = Listener()
    done = recorded(loaded, prompt_file, tmp_path / "t", progress=listener)
    trace, whole = Trace(tmp_path / "t"), Trace(probed)
    assert [(one.prompt, "layer 1" in one.why) for one in done.skipped] == [("emoji#0", True)]
    assert any("emoji#0 is recorded without influence probes" in text for text in listener.said)
    assert trace.sequence_ids == whole.sequence_ids
    assert all(trace.influence("emoji#0", layer) is None for layer in range(4))
    (why,) = trace.sequences["unprobed"].dropna()
    assert why == done.skipped[0].why
    assert torch.equal(probes_of(trace, "plain#0", 0), probes_of(whole, "plain#0", 0))
    assert not validate(tmp_path / "t").problems


def test_probes_of_another_shape_than_the_manifest_says_are_found(
    loaded: LoadedModel, prompt_file: Path, tmp_path: Path
) -> None:
    recorded(loaded, prompt_file, tmp_path / "t", layers=(0,))
    path = tmp_path / "t" / "trace.json"
    manifest = json.loads(path.read_text())
    manifest["settings"]["probes"] |= {"number": 4, "layers": [0, 1]}
    path.write_text(json.dumps(manifest))
    words = " ".join(problem.what for problem in validate(tmp_path / "t").problems)
    assert "probes of layer 0 have shape (3, 4, " in words
    assert "lacks the probes of layer 1 of plain#0" in words


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma3n", "layer 2 of tiny has no influence probes: it is shared"),
        ("gpt_neo", "layer 0 of tiny has no influence probes: it attends by itself"),
        ("qwen3_next", "layer 0 of tiny has no influence probes: it is linear"),
    ],
)
def test_models_that_cannot_give_probes_are_refused_before_anything_is_written(
    prompt_file: Path, tmp_path: Path, family: str, why: str
) -> None:
    model = architectures.model(family)
    spec = read_spec(model, name="tiny", num_tokens=len(tiny.tokenizer()))
    other = LoadedModel(model=model, tokenizer=tiny.tokenizer(), spec=spec)
    with pytest.raises(ModelError, match=why):
        recorded(other, prompt_file, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_layers_are_chosen_by_number_range_or_all() -> None:
    assert parse_layers("--probe-layers", "0,3-5, -1") == (0, 3, 4, 5, -1)
    assert parse_layers("--probe-layers", "all") == "all"
    for text in ("", "a", "1-", "--1", "2..3"):
        with pytest.raises(UsageError, match=r"--probe-layers .* names no layers"):
            parse_layers("--probe-layers", text)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"number": 0}, "at least 1"),
        ({"dtype": "int8"}, "unknown probe dtype"),
        ({"layers": ()}, "name layers"),
        ({"start": "soon"}, "soon"),
    ],
)
def test_impossible_options_are_refused_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ProbeOptions(**wrong)


def test_probes_without_their_capture_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="probes need capture influence, not qkv"):
        RecordOptions(probes=ProbeOptions(number=2))
    with pytest.raises(UsageError, match="no attention that can be seen in layer 7"):
        ProbeOptions(layers=(7,)).chosen(loaded.spec)


def test_the_command_line_records_and_shows_probes(
    model_folder: Path,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "t")
    model, prompts = str(model_folder), str(prompt_file)
    flags = (
        "--capture influence --probes 2 --probe-dtype float16 --probe-layers 0-1 --probe-from 0.5"
    )
    commands = [
        [
            "record",
            "--model",
            model,
            "--prompts",
            prompts,
            "-o",
            out,
            "--limit",
            "2",
            *flags.split(),
        ],
        ["show", out],
    ]
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["tracekit", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    trace = Trace(out)
    own = trace.manifest["settings"]["probes"]
    assert own == {"number": 2, "dtype": "float16", "layers": [0, 1], "from": "0.5", "seed": 0}
    num_rows = int((trace.sequences["num_tokens"] - 1 - trace.sequences["probed_from"]).sum())
    words = capsys.readouterr().out
    assert f"2 influence probes of {num_rows} rows in 2 layers, float16, from 0.5" in words
