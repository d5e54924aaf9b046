from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.conftest import NEW_TOKENS
from tracekit.errors import InputError
from tracekit.progress import Silent
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.trace import writer as writer_module
from tracekit.trace.reader import Trace
from tracekit.trace.validate import damaged_files
from tracekit.trace.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

KILLS = 20

CLOCKS = ["wall_s", "device_bytes"]
"""Columns in which two recordings may differ."""

RUN = ["run_id", "created", "command", "host"]
"""Entries of the manifest in which two recordings may differ."""


def assert_same(one: Trace, other: Trace) -> None:
    """Compare two traces bit for bit, clocks and names of the run left out."""
    pd.testing.assert_frame_equal(one.sequences, other.sequences, check_exact=True)
    mine, theirs = (
        {key: value for key, value in trace.manifest.items() if key not in RUN}
        for trace in (one, other)
    )
    assert mine == theirs
    for name in ("tokens", "steps", "kv", "attention", "keys"):
        pd.testing.assert_frame_equal(rows(one, name), rows(other, name), check_exact=True)
    for sequence_id in one.sequence_ids:
        np.testing.assert_array_equal(one.hidden(sequence_id).data, other.hidden(sequence_id).data)
        assert one.stored_layers(sequence_id) == other.stored_layers(sequence_id)
        for layer in one.stored_layers(sequence_id):
            blocks, same = (trace.attention_inputs(sequence_id, layer) for trace in (one, other))
            for kind, block in blocks.items():
                assert block.dtype == same[kind].dtype
                np.testing.assert_array_equal(block.data, same[kind].data)
            probes, others = (trace.influence(sequence_id, layer) for trace in (one, other))
            assert (probes is None) == (others is None)
            if probes is not None and others is not None:
                assert probes[0] == others[0]
                np.testing.assert_array_equal(probes[1].data, others[1].data)


def rows(trace: Trace, name: str) -> pd.DataFrame:
    """Return a table without its clocks; texts as objects, since dictionaries grow by shards."""
    frame = trace.table(name).drop(columns=CLOCKS, errors="ignore")
    texts = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(texts, object))


class Recorders:
    """A process that records on demand, in children that can be killed."""

    def __init__(self, model: Path, prompts: Path) -> None:
        script = Path(__file__).with_name("crash_child.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(script), str(model), str(prompts), str(NEW_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"

    def run(self, out: Path, kill_after_s: float | None = None) -> int:
        """Record into a folder, and return how that ended; kill it unless it ended before."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(out), kill_after_s]) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("crashes") / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": f"p{number}", "prompt": "the rain " * (1 + number)} for number in range(5)
    ]
    lines.append({"id": "turns", "turns": ["in the morning", "and then?"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, prompts: Path) -> Path:
    """Return a recording that nothing interrupted."""
    out = tmp_path_factory.mktemp("crashes") / "whole"
    again(model_folder, prompts, out)
    return out


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SHARD_SEQUENCES", 2)


def again(model: Path, prompts: Path, out: Path, progress: Any = None, **settings: Any) -> None:
    """Record by the same call."""
    options = RecordOptions(**({"max_new_tokens": NEW_TOKENS} | settings))
    record(str(model), str(prompts), out, options, progress=progress)


@pytest.fixture
def recorders(model_folder: Path, prompts: Path) -> Iterator[Recorders]:
    made = Recorders(model_folder, prompts)
    yield made
    made.close()


def test_killed_at_twenty_moments_a_recording_goes_on_to_the_same_trace(
    recorders: Recorders, tmp_path: Path
) -> None:
    start = time.monotonic()
    assert recorders.run(tmp_path / "whole") == 0
    duration_s = time.monotonic() - start
    whole, moments = Trace(tmp_path / "whole"), random.Random(20)
    kills = rounds = num_resumed = 0
    while kills < KILLS:
        out = tmp_path / f"round {rounds}"
        done = recorders.run(out, kill_after_s=moments.uniform(0, duration_s))
        kills += done == -signal.SIGKILL
        if (out / "trace.json").exists():
            assert not list(damaged_files(Trace(out)))
        if done == 0:
            assert_same(whole, Trace(out))
            rounds += 1
        else:
            assert done == -signal.SIGKILL
            num_resumed += (out / "shards").exists()
    assert recorders.run(out) == 0
    assert_same(whole, Trace(out))
    assert num_resumed >= KILLS // 4


@pytest.mark.parametrize("seed", range(4))
def test_a_disk_that_is_full_at_any_write_loses_the_open_shard_alone(
    seed: int,
    model_folder: Path,
    prompts: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_shards: None,
) -> None:
    write, countdown = pq.ParquetWriter.write_table, random.Random(seed).randrange(1, 60)

    def full(self: Any, *rows: Any, **options: Any) -> None:
        nonlocal countdown
        countdown -= 1
        if countdown <= 0:
            raise OSError(28, "No space left on device")
        write(self, *rows, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(InputError, match="the disk is full; what was finished before is kept"):
            again(model_folder, prompts, tmp_path / "t")
    kept = Trace(tmp_path / "t").sequence_ids
    assert kept == Trace(whole).sequence_ids[: len(kept)]
    assert len(kept) % 2 == 0
    assert not list((tmp_path / "t" / ".open").iterdir())
    again(model_folder, prompts, tmp_path / "t")
    assert_same(Trace(whole), Trace(tmp_path / "t"))


def test_ctrl_c_keeps_what_ended_says_so_and_the_same_call_goes_on(
    model_folder: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    class Impatient(Silent):
        """Interrupts after the third sequence, and keeps what it is told."""

        said: list[str]

        def __init__(self) -> None:
            self.said = []
            self.num_done = 0

        def say(self, text: str) -> None:
            self.said.append(text)

        def advance(self, amount: int = 1) -> None:
            self.num_done += amount
            if self.num_done == 3:
                raise KeyboardInterrupt

    listener = Impatient()
    with pytest.raises(KeyboardInterrupt):
        again(model_folder, prompts, tmp_path / "t", listener)
    assert "the open shard with 3 sequences was finished." in listener.said
    assert Trace(tmp_path / "t").sequence_ids == Trace(whole).sequence_ids[:3]
    again(model_folder, prompts, tmp_path / "t")
    assert_same(Trace(whole), Trace(tmp_path / "t"))


def test_a_second_recorder_on_the_same_folder_is_refused(
    model_folder: Path, prompts: Path, whole: Path
) -> None:
    with (
        TraceWriter(whole, Trace(whole).manifest),
        pytest.raises(InputError, match="another recorder is writing"),
    ):
        again(model_folder, prompts, whole)


def test_other_settings_are_refused_and_all_that_differ_are_named(
    model_folder: Path, prompts: Path, whole: Path
) -> None:
    before = Trace(whole).manifest
    with pytest.raises(InputError) as caught:
        again(model_folder, prompts, whole, seed=1, capture="hidden")
    words = str(caught.value)
    assert 'capture is "hidden", was "qkv"' in words
    assert "seed is 1, was 0" in words
    assert "max_new_tokens" not in words
    assert Trace(whole).manifest == before


def test_overwriting_leaves_nothing_of_what_was_there(
    model_folder: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    again(model_folder, prompts, tmp_path / "t", seed=1, capture="steps", max_new_tokens=2)
    again(model_folder, prompts, tmp_path / "t", overwrite=True)
    assert_same(Trace(whole), Trace(tmp_path / "t"))
    names = [
        sorted(str(path.relative_to(out)) for path in out.rglob("[!.]*"))
        for out in (whole, tmp_path / "t")
    ]
    assert names[0] == names[1]
