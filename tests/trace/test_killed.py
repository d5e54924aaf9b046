from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace.killed import write
from tests.trace.test_remote import assert_same
from tracekit.errors import InputError
from tracekit.trace import writer
from tracekit.trace.reader import Trace
from tracekit.trace.validate import damaged_files


def test_killed_at_any_operation_on_files_a_trace_opens_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overwriting included: what is there is the old trace, the new one, or the start of it."""
    monkeypatch.setattr(writer, "SHARD_SEQUENCES", 1)
    script = Path(__file__).with_name("kill_child.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    count = int(done.stdout)
    assert count > 30
    found = set()
    for number in range(count):
        trace = Trace(tmp_path / str(number))
        assert not list(damaged_files(trace))
        found.add(tuple(trace.sequence_ids))
        seed = trace.manifest["settings"]["seed"]
        if trace.sequence_ids and seed == 1:
            with pytest.raises(InputError, match="seed is 0, was 1"):
                write(tmp_path / str(number))
        write(tmp_path / str(number), overwrite=seed == 1)
        assert_same(Trace(tmp_path / "reference"), Trace(tmp_path / str(number)))
        vocabulary = tmp_path / str(number) / "vocab.parquet"
        assert vocabulary.read_text() == "0"
        names = {path.name for path in (tmp_path / str(number)).iterdir()}
        assert names <= {".lock", ".open", "shards", "trace.json", "vocab.parquet"}
    assert found == {("x#0", "y#0"), (), ("a#0",), ("a#0", "b#0")}
