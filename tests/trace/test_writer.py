from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tracekit import schema
from tracekit.errors import InputError, TraceError, UsageError
from tracekit.spec import HeadSpec, LayerSpec, ModelSpec
from tracekit.trace import writer as writer_module
from tracekit.trace.local_folder import LocalFolder
from tracekit.trace.reader import Trace
from tracekit.trace.validate import damaged_files
from tracekit.trace.writer import TraceWriter

if TYPE_CHECKING:
    from pathlib import Path

SPEC = ModelSpec(
    name="none",
    revision=None,
    model_type="llama",
    fingerprint="f",
    dtype="float32",
    layers=(LayerSpec(index=0, kind="full", num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4),),
    head=HeadSpec(num_rows=10, hidden_size=8),
    ropes={},
    num_tokens=10,
    max_positions=None,
    attention="sdpa",
)


def manifest(**settings: Any) -> dict[str, Any]:
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": "run",
        "settings": {"capture": "qkv", "seed": 0} | settings,
        "model": SPEC.to_json(),
    }


def write_sequence(writer: TraceWriter, sequence_id: str, *, ends: bool = True) -> None:
    """Write six positions in two blocks; the numbers follow from the name and position."""
    start = float(sum(sequence_id.encode()))
    for first in (0, 3):
        ramp = (start + first + np.arange(3, dtype=np.float32))[None, :, None]
        blocks = {"query": np.tile(ramp, (2, 1, 4)), "key": np.tile(ramp, (1, 1, 4))}
        writer.shard.append_blocks(
            sequence_id, 0, first, blocks | {"value": blocks["key"]}, "float32"
        )
    writer.shard.append(
        schema.KEYS, 6, {"sequence_id": sequence_id, "layer": 0, "kv_head": 0, "key": np.arange(6)}
    )
    if ends:
        row = {"sequence_id": sequence_id, "prompt_id": sequence_id, "num_tokens": 7}
        writer.end_sequence(row | {"turn_ends": [[3, 7]]})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", manifest()) as writer:
        write_sequence(writer, "a#0")
        write_sequence(writer, "b#0")
    trace = Trace(tmp_path / "trace")
    assert trace.sequence_ids == ["a#0", "b#0"]
    key = trace.attention_inputs("b#0", 0)["key"]
    assert key.dtype == "float32"
    assert key.data.shape == (1, 6, 4)
    assert key.data[0, :, 0].tolist() == [sum(b"b#0") + step for step in range(6)]
    assert trace.table("keys", sequence_id="a#0")["key"].tolist() == list(range(6))
    assert list(trace.sequences["turn_ends"][0]) == [3, 7]
    assert ModelSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == trace.spec


def test_a_sequence_that_never_ended_is_seen_by_no_reader(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TraceWriter(tmp_path, manifest()) as writer:
            write_sequence(writer, "a#0")
            write_sequence(writer, "lost#0", ends=False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    trace = Trace(tmp_path)
    assert trace.sequence_ids == ["a#0"]
    assert set(trace.table("keys")["sequence_id"]) == {"a#0"}
    # Also where the ids are not asked for.
    bare = trace.table("keys", columns=["key"])
    assert list(bare.columns) == ["key"]
    assert len(bare) == len(trace.table("keys"))


def test_a_sequence_that_was_interrupted_and_recorded_again_is_read_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "a#0")
        write_sequence(writer, "again#0", ends=False)
        writer.shard._write("keys")  # as a long sequence does
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "again#0")
    keys = Trace(tmp_path).table("keys")
    assert keys["sequence_id"].astype(str).tolist() == ["a#0"] * 6 + ["again#0"] * 6


@pytest.mark.parametrize(
    ("ended", "damaged", "words"),
    [
        (2, False, "the open shard with 2 sequences was finished"),
        (1, False, "the open shard with 1 sequence was finished"),
        (0, False, "the open shard was dropped, it held no finished sequence"),
        (2, True, "the open shard was dropped, it could not be written"),
    ],
)
def test_a_writer_says_on_parting_what_happened_to_the_open_shard(
    tmp_path: Path, ended: int, damaged: bool, words: str
) -> None:
    writer = TraceWriter(tmp_path, manifest())

    def interrupted() -> None:
        with writer:
            for number in range(ended):
                write_sequence(writer, f"{number}#0")
            write_sequence(writer, "open#0", ends=False)
            writer.shard.is_damaged = damaged
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert writer.parting == words
    assert len(Trace(tmp_path).sequence_ids) == (0 if damaged else ended)
    assert not list((tmp_path / ".open").iterdir())


def test_a_write_that_fails_drops_the_shard_though_something_else_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = TraceWriter(tmp_path, manifest())

    def stopped() -> None:
        with writer:
            write_sequence(writer, "a#0")
            monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
            with pytest.raises(OSError, match="No space left"):
                write_sequence(writer, "b#0")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert writer.parting == "the open shard was dropped, it could not be written"
    assert Trace(tmp_path).sequence_ids == []


@pytest.mark.parametrize("moved", [False, True])
def test_a_shard_whose_closing_was_interrupted_is_closed_on_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    add_shard = LocalFolder.add_shard

    def once(self: LocalFolder, built: Path, number: int) -> None:
        monkeypatch.setattr(LocalFolder, "add_shard", add_shard)
        if moved:
            add_shard(self, built, number)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFolder, "add_shard", once)
    writer = TraceWriter(tmp_path, manifest())

    def interrupted() -> None:
        with writer:
            write_sequence(writer, "a#0")
            writer.close_shard()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert writer.parting == "the open shard with 1 sequence was finished"
    assert Trace(tmp_path).sequence_ids == ["a#0"]


def test_a_recording_that_was_killed_before_its_manifest_goes_on(tmp_path: Path) -> None:
    (tmp_path / ".open").mkdir()
    (tmp_path / ".open" / "trace.json").write_text("{")
    (tmp_path / ".lock").write_text("")
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "a#0")
    assert Trace(tmp_path).sequence_ids == ["a#0"]


def test_a_shared_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def half(path: Path) -> None:
        path.write_text("wo")
        raise OSError(28, "No space left on device")

    def whole(path: Path) -> None:
        path.write_text("words")

    with TraceWriter(tmp_path, manifest()) as writer:
        with pytest.raises(OSError, match="No space left"):
            writer.add_file("vocab.parquet", half)
        assert not writer.has_file("vocab.parquet")
        writer.add_file("vocab.parquet", whole)
        writer.add_file("weights.safetensors", whole)
        write_sequence(writer, "a#0")
    with TraceWriter(tmp_path, manifest()) as writer:
        assert writer.has_file("vocab.parquet")
        assert writer.has_file("weights.safetensors")
    constants = Trace(tmp_path).manifest["constants"]
    assert {name: entry["bytes"] for name, entry in constants.items()} == {
        "vocab.parquet": 5,
        "weights.safetensors": 5,
    }
    assert not list(damaged_files(Trace(tmp_path)))


def test_the_same_settings_go_on_and_others_are_refused_by_name(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "a#0")
    with TraceWriter(tmp_path, manifest()) as writer:
        assert writer.finished == {"a#0"}
        write_sequence(writer, "b#0")
    assert Trace(tmp_path).sequence_ids == ["a#0", "b#0"]
    with pytest.raises(InputError, match=r"seed is 1, was 0.*--overwrite"):
        TraceWriter(tmp_path, manifest(seed=1)).__enter__()
    with TraceWriter(tmp_path, manifest(seed=1), overwrite=True) as writer:
        assert writer.finished == set()
    assert Trace(tmp_path).sequence_ids == []


def test_types_do_not_depend_on_which_shard_has_a_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"num_tokens": 7, "turn_ends": [[7]]}
    ends = {"a#0": None, "b#0": 3}
    for name, size in (("one", 64), ("two", 1)):
        monkeypatch.setattr(writer_module, "SHARD_SEQUENCES", size)
        with TraceWriter(tmp_path / name, manifest()) as writer:
            for sequence_id, end in ends.items():
                writer.end_sequence(row | {"sequence_id": sequence_id, "context_end": end})
    one, two = (Trace(tmp_path / name) for name in ("one", "two"))
    assert len(two.shards) == 2
    pd.testing.assert_frame_equal(one.sequences, two.sequences)


def test_a_folder_without_a_sequence_ties_nobody_to_its_settings(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest()):
        pass
    with TraceWriter(tmp_path, manifest(seed=1)) as writer:
        write_sequence(writer, "a#0")
    assert Trace(tmp_path).manifest["settings"]["seed"] == 1


def test_a_shard_closes_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SHARD_SECONDS", 0.0)
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "a#0")
        assert Trace(tmp_path).sequence_ids == ["a#0"]


def test_a_shard_without_its_listing_is_named_when_going_on(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "a#0")
    (tmp_path / "shards" / "00000" / "sequences.parquet").unlink()
    with pytest.raises(TraceError, match=r"00000 has no readable sequences\.parquet"):
        TraceWriter(tmp_path, manifest()).__enter__()


def test_there_is_no_layer_before_the_first(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "a#0")
    with pytest.raises(UsageError, match="there is no layer -1: layers are 0 to 0"):
        Trace(tmp_path).attention_inputs("a#0", -1)


def test_a_disk_error_loses_the_open_shard_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SHARD_SEQUENCES", 1)

    def full() -> None:
        with writer_module.disk_errors(tmp_path), TraceWriter(tmp_path, manifest()) as writer:
            write_sequence(writer, "a#0")
            write_sequence(writer, "lost#0", ends=False)
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="the disk is full; what was finished before is kept"):
        full()
    assert Trace(tmp_path).sequence_ids == ["a#0"]
    assert not list((tmp_path / ".open").iterdir())


def test_two_writers_on_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    with (
        TraceWriter(tmp_path, manifest()),
        pytest.raises(InputError, match="another recorder is writing"),
    ):
        TraceWriter(tmp_path, manifest()).__enter__()


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(TraceError, match="holds something that is no trace"):
            TraceWriter(tmp_path, manifest(), overwrite=overwrite).__enter__()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        TraceWriter(tmp_path / "file", manifest()).__enter__()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "it has no trace.json"),
        ("{", "is damaged at line 1, column 2"),
        ('{"schema_version": 99}', "schema version 99"),
        ("[]", "schema version None"),
    ],
)
def test_a_folder_without_a_good_manifest_is_no_trace(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    with pytest.raises(TraceError, match=words):
        Trace(tmp_path)


def test_names_that_do_not_exist_are_answered_with_the_nearest(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest()) as writer:
        write_sequence(writer, "a#0")
    trace = Trace(tmp_path)
    with pytest.raises(Exception, match="unknown table 'step'; did you mean 'steps'"):
        trace.table("step")
    with pytest.raises(Exception, match="unknown sequence 'a#1'; did you mean 'a#0'"):
        trace.hidden("a#1")
    with pytest.raises(TraceError, match="holds no final hidden states of a#0"):
        trace.hidden("a#0")


def test_a_file_url_is_the_folder_that_it_names(tmp_path: Path) -> None:
    from tracekit.trace.local_folder import LocalFolder
    from tracekit.trace.open_folder import open_folder

    folder = open_folder(f"file://{tmp_path}/t")
    assert isinstance(folder, LocalFolder)
    assert folder.path == tmp_path / "t"
