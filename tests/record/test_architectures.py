"""The whole way on every family: what is recorded is true, and what cannot be is said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import architectures, tiny
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.simulate.plan import make_plan
from tracekit.simulate.run import simulate
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from pathlib import Path

DECODERS = [name for name in architectures.SETTINGS if name != "bert"]
WITHOUT_ATTENTION = ("deepseek_v3", "falcon", "mamba")


class Notes:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, what: str, total: int, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int = 1) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        self.told.append(text)


@pytest.mark.parametrize("name", DECODERS)
def test_a_family_is_recorded_and_replayed(name: str, tmp_path: Path) -> None:
    architectures.model(name).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "p.txt").write_text("the rain on the river in the morning was long\n")
    notes = Notes()
    options = RecordOptions(max_new_tokens=14)
    done = record(
        str(tmp_path / "model"), str(tmp_path / "p.txt"), tmp_path / "t", options, progress=notes
    )
    assert done.num_sequences == 1
    assert validate(tmp_path / "t").problems == ()
    trace = Trace(tmp_path / "t")
    seen = [one.index for one in trace.spec.layers if one.num_heads and one.refusal is None]
    assert ("gives no attention" in " ".join(notes.told)) == (name in WITHOUT_ATTENTION)
    assert trace.stored_layers(trace.sequence_ids[0]) == seen
    simulated = simulate(tmp_path / "t", tmp_path / "r", make_plan(sizes=(16,)))
    assert not simulated.failed
    assert bool(simulated.skipped) == (name in WITHOUT_ATTENTION)
