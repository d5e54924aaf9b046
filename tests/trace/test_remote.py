from __future__ import annotations

import itertools
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from tests.trace.stores import files_of, memory_url, s3_server
from tests.trace.test_writer import manifest, write_sequence
from tracekit.errors import InputError, TraceError, UsageError
from tracekit.trace import writer as writer_module
from tracekit.trace.open_folder import open_folder
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate
from tracekit.trace.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ["a#0", "b#0", "c#0", "d#0"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as url:
        yield url


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty folder."""
    name = request.node.name.replace("[", "-").replace("]", "")
    if request.param == "memory":
        return memory_url(name)
    return f"{request.getfixturevalue('bucket')}/{name}"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(writer_module, "SHARD_SEQUENCES", 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def write(where: str | Path, names: list[str] = NAMES, **settings: Any) -> TraceWriter:
    """Write what is missing of some sequences, and return the writer, left."""
    with TraceWriter(where, manifest(**settings)) as writer:
        if not writer.has_file("vocab.parquet"):
            writer.add_file("vocab.parquet", lambda path: path.write_bytes(b"words"))
        for name in names:
            if name not in writer.finished:
                write_sequence(writer, name)
    return writer


def assert_same(one: Trace, other: Trace) -> None:
    pd.testing.assert_frame_equal(one.sequences, other.sequences)
    assert one.manifest == other.manifest
    pd.testing.assert_frame_equal(one.table("keys"), other.table("keys"))
    assert one.sequence_ids == other.sequence_ids
    for name in one.sequence_ids:
        assert one.stored_layers(name) == other.stored_layers(name)
        pd.testing.assert_frame_equal(
            one.table("keys", sequence_id=name), other.table("keys", sequence_id=name)
        )
        mine, theirs = (trace.attention_inputs(name, 0) for trace in (one, other))
        for kind in ("query", "key", "value"):
            np.testing.assert_array_equal(mine[kind].data, theirs[kind].data)


def test_a_remote_trace_equals_the_local_one(url: str, tmp_path: Path) -> None:
    write(tmp_path / "trace")
    writer = write(url)
    assert_same(Trace(tmp_path / "trace"), Trace(url))
    assert Trace(tmp_path / "trace").num_bytes == Trace(url).num_bytes
    assert str(Trace(url).path) == url
    assert not any(writer._folder.open_path.iterdir())


def failing(put_file: Callable[..., None], at: int) -> Callable[..., None]:
    """Return ``put_file`` that raises when it is called for the ``at``-th time."""
    calls = itertools.count()

    def put(source: str, target: str) -> None:
        if next(calls) == at:
            raise ConnectionError("the network is gone")
        put_file(source, target)

    return put


def test_an_upload_that_fails_at_any_file_loses_its_shard_alone(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "trace")
    files = files_of(url)
    # Uploaded are trace.json, vocab.parquet, trace.json, and two shards of three files.
    for at, kept in ((2, 0), (3, 0), (5, 0), (8, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(files, "put_file", failing(files.put_file, at))
            with pytest.raises(InputError, match=r"the network is gone.*finished before is kept"):
                write(url)
        assert len(Trace(url).sequence_ids) == kept
        write(url)
        assert_same(Trace(tmp_path / "trace"), Trace(url))
        files.rm(url, recursive=True)


def test_the_writer_says_that_an_upload_failed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceWriter(url, manifest()) as writer:
        write_sequence(writer, "a#0")
        with monkeypatch.context() as patch:
            patch.setattr(files_of(url), "put_file", lambda *_: 1 / 0)
            with pytest.raises(InputError, match=r"cannot write .*00000/keys.parquet"):
                writer.close_shard()
    assert writer.parting == "the open shard was dropped, it could not be written"
    assert Trace(url).sequence_ids == []


def test_a_shard_without_its_listing_does_not_exist_and_is_replaced(url: str) -> None:
    write(url)
    files = files_of(url)
    files.rm_file(f"{url}/shards/00001/sequences.parquet")
    files.pipe_file(f"{url}/shards/00001/steps.parquet", b"left over")
    assert Trace(url).sequence_ids == NAMES[:2]
    write(url)
    assert Trace(url).sequence_ids == NAMES
    assert not files.exists(f"{url}/shards/00001/steps.parquet")


def test_a_killed_recording_leaves_nothing_on_this_machine_that_is_taken_up(url: str) -> None:
    folder = open_folder(url)
    half = folder.open_path / "00000"
    half.mkdir(parents=True)
    (half / "steps.parquet").write_bytes(b"half")
    write(url)
    assert Trace(url).sequence_ids == NAMES
    assert not half.exists()


def test_other_settings_are_refused_and_overwriting_starts_anew(url: str) -> None:
    write(url)
    with pytest.raises(InputError, match=r"seed is 1, was 0.*--overwrite"):
        write(url, seed=1)
    with TraceWriter(url, manifest(seed=1), overwrite=True) as writer:
        assert writer.finished == set()
        write_sequence(writer, "z#0")
    assert Trace(url).sequence_ids == ["z#0"]
    assert not files_of(url).exists(f"{url}/shards/00001/keys.parquet")
    assert not files_of(url).exists(f"{url}/vocab.parquet")


def test_two_writers_of_this_machine_the_second_is_refused(url: str) -> None:
    with (
        TraceWriter(url, manifest()),
        pytest.raises(InputError, match="another recorder is writing"),
    ):
        TraceWriter(url, manifest()).__enter__()


def test_a_folder_that_holds_something_else_is_left_alone(url: str) -> None:
    files_of(url).pipe_file(f"{url}/thesis.tex", b"years of work")
    with pytest.raises(TraceError, match="holds something that is no trace"):
        write(url)
    with pytest.raises(InputError, match=r"thesis\.tex is a file"):
        write(f"{url}/thesis.tex")
    with pytest.raises(TraceError, match=r"is no trace: it has no trace\.json"):
        Trace(url)


def test_a_bucket_that_is_missing_is_named(bucket: str) -> None:
    with pytest.raises(InputError, match=r"s3://nowhere/trace.*bucket does not exist"):
        write("s3://nowhere/trace")
    with pytest.raises(TraceError, match=r"s3://nowhere/trace is no trace"):
        Trace("s3://nowhere/trace")


def test_a_folder_that_s3_marks_as_empty_is_empty(bucket: str) -> None:
    url = f"{bucket}/marked"
    files_of(url).touch(f"{url}/")
    write(url)
    files_of(url).touch(f"{url}/shards/")
    write(f"{url}/", [*NAMES, "e#0"])
    assert Trace(url).sequence_ids == [*NAMES, "e#0"]


def test_a_trace_that_grew_is_seen_by_the_next_reader(url: str) -> None:
    write(url, NAMES[:2])
    assert Trace(url).sequence_ids == NAMES[:2]
    write(url)
    assert Trace(url).sequence_ids == NAMES


def test_the_head_is_downloaded_once_and_goes_with_its_trace(url: str) -> None:
    with TraceWriter(url, manifest()) as writer:
        writer.add_file("weights.safetensors", lambda path: path.write_bytes(b"head"))
        assert writer.has_file("weights.safetensors")
    trace = Trace(url)
    path = trace.weights_path
    assert path.read_bytes() == b"head"
    assert trace.weights_path == path
    del trace
    assert not path.exists()


def test_a_recorded_trace_that_was_copied_to_a_store_is_whole(
    url: str, trace_folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(trace_folder, tmp_path / "trace")
    files = files_of(url)
    files.put(f"{copy}/", f"{url}/", recursive=True)
    here, there = validate(trace_folder), validate(url)
    assert there.problems == ()
    assert (there.num_sequences, there.num_steps) == (here.num_sequences, here.num_steps)
    path = f"{url}/shards/00000/tensors.parquet"
    data = bytearray(files.cat_file(path))
    data[len(data) // 2] ^= 1
    files.pipe_file(path, bytes(data))
    [problem] = validate(url).problems
    assert problem.what == "has another SHA-256 than was written"


def test_a_recording_goes_straight_to_a_store(
    model_folder: Path, prompt_file: Path, trace_folder: Path
) -> None:
    from tests.conftest import NEW_TOKENS
    from tests.record import test_crashes
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record

    url = memory_url("recorded")
    done = record(
        str(model_folder), str(prompt_file), url, RecordOptions(max_new_tokens=NEW_TOKENS)
    )
    assert str(done.path) == url
    test_crashes.assert_same(Trace(trace_folder), Trace(url))
    assert Trace(url).weights_path.read_bytes() == Trace(trace_folder).weights_path.read_bytes()


def test_a_store_is_simulated_like_a_folder(
    trace_folder: Path, results_folder: Path, tmp_path: Path
) -> None:
    from tracekit.simulate.plan import make_plan
    from tracekit.simulate.run import simulate

    url = memory_url("simulated")
    files_of(url).put(f"{trace_folder}/", f"{url}/", recursive=True)
    simulate(url, tmp_path / "results", make_plan(sizes=(16, 64, 4096)))
    for name in ("kv", "vocab", "summary", "shown"):
        mine, theirs = (at / f"{name}.parquet" for at in (tmp_path / "results", results_folder))
        assert mine.read_bytes() == theirs.read_bytes()


def test_the_commands_take_a_url(trace_folder: Path) -> None:
    from typer.testing import CliRunner

    from tracekit.cli.app import app

    url = memory_url("commands")
    files_of(url).put(f"{trace_folder}/", f"{url}/", recursive=True)
    for command in ("show", "validate"):
        done = CliRunner().invoke(app, [command, url])
        assert done.exit_code == 0
        assert url in done.stdout


def test_a_protocol_that_nobody_speaks_is_named() -> None:
    with pytest.raises(UsageError, match=r"nothing://x cannot be reached .* nothing://"):
        Trace("nothing://x")


def test_a_store_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    url = memory_url("silent")
    write(url)

    def silent(*_: Any, **__: Any) -> None:
        raise RuntimeError("no credentials\nand more")

    for name in ("cat_file", "open", "find", "info"):
        monkeypatch.setattr(files_of(url), name, silent)
    words = r"\(no credentials\); check the address, the network and the credentials\."
    with pytest.raises(TraceError, match=words):
        Trace(url)
    with pytest.raises(TraceError, match=words):
        write(url)
