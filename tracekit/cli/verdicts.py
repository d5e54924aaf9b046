"""Candidate sets in ``tracekit show RESULTS``: verdicts, and all schemes at one size."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tracekit.cli.candidate_rows import (
    CEILING,
    Row,
    brief_table,
    ceiling_text,
    head_share,
    read_rows,
)
from tracekit.cli.output import WIDTH, number, range_text
from tracekit.schema import ANY, CANDIDATE_STATS, HEAD_TIMES, VERDICTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_FEW = "too few sequences"


def read_verdicts(folder: Path) -> tuple[list[Row], str]:
    """Return the verdicts of a results folder as rows, and what is shown of candidate sets as text.

    The text is empty where no set was tried.
    """
    rows, stats = (
        read_rows(folder, VERDICTS),
        read_rows(folder, CANDIDATE_STATS, grouping=ANY),
    )
    if not stats:
        return rows, ""
    times = read_rows(folder, HEAD_TIMES)
    share = head_share(times)
    sizes = sorted({row["size"] for row in stats})
    size = sizes[len(sizes) // 2]
    title = f"candidate sets of {size} tokens, all steps alike, level local"
    parts = [
        brief_table(title, [row for row in stats if row["size"] == size], share, {"name": _name}),
        "\n".join([CEILING, *_timed(times, size)]),
        "\n".join(_lines(rows, share)),
        "tracekit show RESULTS --vocab NAME [--size N] [--group domain] tells more of one of them.",
    ]
    return rows, "\n\n".join(parts)


def _timed(times: Sequence[Row], size: int) -> Iterator[str]:
    """Yield what sets of one size took on the machine of the run, one request at a time."""
    for row in times:
        if (row["batch"], row["size"]) == (1, size):
            both_ms, full_ms = 1e3 * (row["gather_s"] + row["multiply_s"]), 1e3 * row["full_s"]
            yield textwrap.fill(
                f"measured on the machine of the run, {row['dtype']}, threads {row['threads']}: {size} "
                f"rows gathered and multiplied in {both_ms:.3g} ms, the full head in {full_ms:.3g} ms",
                WIDTH,
            )


def _lines(rows: Sequence[Row], share: float | None) -> Iterator[str]:
    """Yield verdicts, those on too few sequences together."""
    for row in rows:
        if row["verdict"] != _FEW:
            yield textwrap.fill(_line(row, share), WIDTH, subsequent_indent="  ")
    few = {row["domain"]: row for row in rows if row["verdict"] == _FEW}
    if few:
        known = ", ".join(f"{name} n = {row['n']}" for name, row in few.items())
        yield textwrap.fill(f"{_FEW} for a verdict: {known}.", WIDTH, subsequent_indent="  ")


def _line(row: Row, share: float | None) -> str:
    start = f"{row['domain']}, {100 * row['hit_level']:g} % of most likely tokens: {row['why']}"
    if row["estimator"] is None:
        return f"{start}."
    best = "" if row["verdict"] == "kept" else "the best is "
    hit = range_text(row["hit_argmax"], row["low"], row["high"])
    return (
        f"{start}; {best}{_name(row)} at {row['size']}: hit_argmax {hit}, n = {row['n']}, cost_frac "
        f"{number(row['cost_frac'])}, ceiling {ceiling_text(share, row['cost_frac'])}."
    )


def _name(row: Row) -> str:
    from tracekit.simulate.summary import scheme_name

    return scheme_name(row["estimator"], row["controller"], row["fit"])
