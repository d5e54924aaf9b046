"""What the killed writers of ``kill_child.py`` write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.trace.test_writer import manifest, write_sequence
from tracekit.trace.writer import TraceWriter

if TYPE_CHECKING:
    from pathlib import Path


def begin(out: Path) -> None:
    """Write a trace of other settings."""
    fill(out, 1, ["x#0", "y#0"], overwrite=False)


def write(out: Path, *, overwrite: bool = False) -> None:
    """Write the trace that all must become."""
    fill(out, 0, ["a#0", "b#0"], overwrite=overwrite)


def fill(out: Path, seed: int, names: list[str], *, overwrite: bool) -> None:
    """Write what is missing of a trace."""
    with TraceWriter(out, manifest(seed=seed), overwrite=overwrite) as writer:
        if not writer.has_file("vocab.parquet"):
            writer.add_file("vocab.parquet", lambda path: path.write_text(f"{seed}"))
        for name in names:
            if name not in writer.finished:
                write_sequence(writer, name)
