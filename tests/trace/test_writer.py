from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tracekit import schema
from tracekit.errors import InputError, TraceError, UsageError
from tracekit.spec import HeadSpec, LayerSpec, ModelSpec
from tracekit.trace import writer as writer_module
from tracekit.trace.reader import Trace
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


def test_a_folder_without_a_sequence_ties_nobody_to_its_settings(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest()):
        pass
    with TraceWriter(tmp_path, manifest(seed=1)) as writer:
        write_sequence(writer, "a#0")
    assert Trace(tmp_path).manifest["settings"]["seed"] == 1


def test_a_larger_limit_goes_on(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, manifest(limit=1)) as writer:
        write_sequence(writer, "a#0")
    with TraceWriter(tmp_path, manifest(limit=2)) as writer:
        write_sequence(writer, "b#0")
    assert Trace(tmp_path).sequence_ids == ["a#0", "b#0"]


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
