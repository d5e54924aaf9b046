"""Candidate sets in ``tracekit show RESULTS``: all schemes at one size, and verdicts."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tracekit.cli.candidate_rows import (
    LEGEND,
    Found,
    brief_table,
    by_cell,
    ceiling_text,
    head_share,
    of_size,
)
from tracekit.cli.output import WIDTH, number, range_text
from tracekit.cli.results_folder import Row, read_rows
from tracekit.schema import ANY, CANDIDATE_STATS, DECODED_FITS, HEAD_TIMES, VERDICTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_FEW = "too few prompts"


def read_verdicts(folder: Path, size: int | None = None) -> tuple[list[Row], str]:
    """Return the verdicts of a results folder as rows, and what is shown of candidate sets as text.

    Parameters
    ----------
    folder
        Of results.
    size
        The size of which schemes are compared; None: the middle one of those asked.

    Returns
    -------
    rows, text
        The text is empty where no set was tried.

    Raises
    ------
    InputError
        If a table is damaged, or no set of that size was tried.
    """
    rows, stats = read_rows(folder, VERDICTS), read_rows(folder, CANDIDATE_STATS, grouping=ANY)
    if not stats:
        return rows, ""
    times = read_rows(folder, HEAD_TIMES)
    share = head_share(times)
    sizes = sorted({row["size"] for row in stats})
    shown = sizes[len(sizes) // 2] if size is None else size
    cells = by_cell([row for row in of_size(stats, shown) if row["fit"] in DECODED_FITS])
    cells.sort(key=lambda one: (-one["hit_argmax"]["value"], one["cost_frac"]["value"]))
    asked = ", ".join(map(str, sizes))
    title = f"candidate sets of {shown} tokens of {asked} asked, all steps alike, level local"
    parts = [
        brief_table(title, cells, share, {"name": _brief}),
        "--vocab SCHEME tells more of one of them, --size N compares them at another size.",
        textwrap.fill(f"{LEGEND}.", WIDTH),
        "\n".join(_timed(times, shown)),
        "\n".join(_lines(rows, share)),
    ]
    return rows, "\n\n".join(filter(None, parts))


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
    """Yield verdicts, those on too few prompts together."""
    for row in rows:
        if row["verdict"] != _FEW:
            yield textwrap.fill(_line(row, share), WIDTH, subsequent_indent="  ")
    few = {row["domain"]: row for row in rows if row["verdict"] == _FEW}
    if few:
        known = ", ".join(f"{name} {row['n_choosing']} + {row['n']}" for name, row in few.items())
        yield textwrap.fill(
            f"{_FEW} for a verdict (choosing + judging): {known}.", WIDTH, subsequent_indent="  "
        )


def _line(row: Row, share: float | None) -> str:
    start = f"{row['domain']}, {100 * row['hit_level']:g} % of most likely tokens: {row['why']}"
    if row["estimator"] is None:
        return f"{start}."
    best = "" if row["verdict"] in _CHOSEN else "the best is "
    hit = range_text(row["hit_argmax"], row["low"], row["high"], 4)
    return (
        f"{start}; {best}{_name(row)} at {row['size']}: hit_argmax {hit} on n = {row['n']} "
        f"prompts that judge, {number(row['hit_choosing'], 4)} on n = {row['n_choosing']} that choose, cost_frac "
        f"{number(row['cost_frac'])}, ceiling {ceiling_text(share, row['cost_frac'])}."
    )


_CHOSEN = ("kept", "not kept on the other half")
"""Verdicts on a set that kept the level where it was chosen."""


def _name(row: Row) -> str:
    from tracekit.simulate.scheme_name import scheme_name

    return scheme_name(row["estimator"], row["controller"], row["fit"])


def _brief(found: Found) -> str:
    """Return a scheme's name without the parameters that are as usual, bounds named so."""
    from tracekit.errors import UsageError
    from tracekit.vocab.scheme import parse_scheme

    text = _name(found["hit_argmax"])
    try:
        scheme = parse_scheme(text)
    except UsageError:
        return text  # of a package that is not installed here
    return scheme.short if scheme.is_method else f"{scheme.short} (bound)"
