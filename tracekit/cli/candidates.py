"""``tracekit show RESULTS --vocab``: what the candidate sets of one scheme hold, miss and cost."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tracekit.cli.candidate_rows import (
    LEGEND,
    Found,
    at_size,
    brief_table,
    by_cell,
    ceiling_text,
    gain_tables,
    head_share,
    of_size,
)
from tracekit.cli.output import WIDTH, number, share_text, table
from tracekit.cli.results_folder import Row, read_rows
from tracekit.schema import (
    ANY,
    BATCH_UNIONS,
    CANDIDATE_STATS,
    HEAD_TIMES,
    MISS_CLASSES,
    MISSES,
    VOCAB_RESULTS,
)
from tracekit.simulate.folder import read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tracekit.vocab.scheme import Scheme

_CONTEXT_CELLS = 22
"""Width of what is shown of the text before a miss."""


def read_vocab(
    folder: Path, scheme: str, size: int | None, group: str
) -> tuple[dict[str, Any], str]:
    """Return the statistics of a scheme's candidate sets as data, and as text.

    Parameters
    ----------
    folder
        Of results with candidate sets.
    scheme
        Its text, ``previous@rate``, or its canonical text.
    size
        One size, told in full; None: all sizes, told briefly.
    group
        A group of steps as the table names it, ``all``, ``story``, ``1-2 nats`` ..., or a grouping,
        ``domain``, all of whose groups are told briefly.

    Raises
    ------
    InputError
        If the results are damaged or of another version, or hold no such scheme, size or group.
    UsageError
        If there is no such scheme at all.
    """
    from tracekit.vocab.scheme import parse_scheme

    run, asked = read_run(folder), parse_scheme(scheme)
    seed = run["seed"]
    named = {"estimator": asked.estimator.text, "controller": asked.control}
    records = _of_group(of_size(_held(folder, named, asked.text), size), group)
    share = head_share(read_rows(folder, HEAD_TIMES))
    data: dict[str, Any] = {"scheme": asked.text, "statistics": records, "head_share": share}
    parts = [_title(asked.text, records, group, seed)]
    if asked.controller.adapts and group == ANY:
        data["gains"], told = _gains(folder, asked, size, seed)
        parts += told
    for fit in dict.fromkeys(row["fit"] for row in records):
        rows = [row for row in records if row["fit"] == fit]
        parts.append(_of_fit(rows, share, size, group))
        if group == ANY:
            beside = {
                one.name: at_size(read_rows(folder, one, **named, fit=fit), size) for one in _BESIDE
            }
            parts += _beside(beside, size)
            for name, some in beside.items():
                data.setdefault(name, []).extend(some)
    if size is None:
        parts.append(
            "--size N tells one size in full; --group domain, class, entropy ... by group."
        )
    return data, "\n\n".join(parts)


def _gains(
    folder: Path, scheme: Scheme, size: int | None, seed: int
) -> tuple[list[Row], list[str]]:
    """Return what the controller of a scheme gains, as data and as text."""
    from tracekit.simulate.controller_gains import gains
    from tracekit.vocab.controllers.fixed import Fixed

    fixed = replace(scheme, controller=Fixed())
    rows = read_rows(folder, VOCAB_RESULTS, estimator=scheme.estimator.text)
    tried, base = (
        at_size([row for row in rows if row["controller"] == one.control], size)
        for one in (scheme, fixed)
    )
    told = gains(tried, base, seed=seed)
    lacking = f"The fixed set was not tried: simulate with --vocab {fixed.text} too."
    return told, [*gain_tables(told), *([] if base else [textwrap.fill(lacking, WIDTH)])]


def _of_fit(rows: Sequence[Row], share: float | None, size: int | None, group: str) -> str:
    """Return the statistics of a fit: one size and group in full, else a line each."""
    title = _FITS[rows[0]["fit"]]
    is_grouping = rows[0]["grouping"] == group != ANY
    if size is not None and not is_grouping:
        return _statistics(title, rows, share)
    names = ("group", "size") if is_grouping else ("size", "chosen")
    return brief_table(title, by_cell(rows), share, {name: _READ[name] for name in names})


_READ: dict[str, Callable[[Found], str]] = {
    "group": lambda found: str(found["hit_argmax"]["group"]),
    "size": lambda found: str(found["hit_argmax"]["size"]),
    "chosen": lambda found: share_text(found["hit_chosen"]["value"]),
}


_FITS = {
    "asked": "",
    "others": "sizes fitted on other prompts",
    "own": "sizes fitted on the sequence itself: a fair comparison, no method",
    "shuffled": "the same sizes at other steps: what timing is worth",
}

_BESIDE = (BATCH_UNIONS, MISS_CLASSES, MISSES)


def _held(folder: Path, named: dict[str, str], text: str) -> list[Row]:
    """Return the statistics of a scheme."""
    from tracekit.errors import InputError
    from tracekit.simulate.scheme_name import scheme_name

    rows = read_rows(folder, CANDIDATE_STATS, **named)
    if rows:
        return rows
    held = read_rows(folder, CANDIDATE_STATS, grouping=ANY, statistic="hit_argmax")
    if not held:
        msg = f"{folder} holds no candidate sets: simulate with --vocab {text}."
        raise InputError(msg)
    names = dict.fromkeys(scheme_name(row["estimator"], row["controller"], "asked") for row in held)
    msg = f"{folder} has no candidate sets of {text}: it has {'; '.join(names)}."
    raise InputError(msg)


def _of_group(rows: Sequence[Row], group: str) -> list[Row]:
    """Return the statistics of a group, or of all groups of a grouping."""
    from tracekit.errors import InputError

    for name in ("group", "grouping"):
        if found := [row for row in rows if row[name] == group]:
            return [row for row in found if row["grouping"] == found[0]["grouping"]]
    kinds = dict.fromkeys(row["grouping"] for row in rows)
    groups = dict.fromkeys(row["group"] for row in rows)
    msg = (
        f"there is no group {group!r} of steps: choose a grouping, {', '.join(kinds)}, or one of "
        f"{', '.join(groups)}."
    )
    raise InputError(msg)


def _title(text: str, records: Sequence[Row], group: str, seed: int) -> str:
    most_steps, most_n = (max(row[name] for row in records) for name in ("num_steps", "n"))
    where = "" if group == ANY else f", {group}"
    title = (
        f"{text}, level local{where}: up to {most_steps} steps of {most_n} sequences, seed {seed}. "
        "Values take all steps alike, intervals are over sequences. chosen: the recorded token is a "
        f"candidate; {LEGEND}."
    )
    return textwrap.fill(title, WIDTH)


def _statistics(title: str, rows: Sequence[Row], share: float | None) -> str:
    """Return all statistics of one cell and group."""
    cells = [
        [
            row["statistic"],
            number(row["value"], 4),
            "" if row["low"] is None else f"[{number(row['low'], 4)}, {number(row['high'], 4)}]",
            row["unit"],
            str(row["n"]),
            str(row["num_steps"]),
        ]
        for row in rows
    ]
    spent = next((row["value"] for row in rows if row["statistic"] == "cost_frac"), None)
    if spent is not None:
        cells.append(["ceiling", ceiling_text(share, spent), "", "times", "", ""])
    return table(title, ["statistic", "value", "interval", "unit", "n", "steps"], cells)


def _beside(told: dict[str, list[Row]], size: int | None) -> list[str]:
    """Return what is told of all steps together beside statistics."""
    parts = [_batches(told[BATCH_UNIONS.name])] if told[BATCH_UNIONS.name] else []
    if size is not None:
        parts += [_classes(told[MISS_CLASSES.name])] if told[MISS_CLASSES.name] else []
        parts += [_misses(told[MISSES.name])] if told[MISSES.name] else ["no miss"]
    return parts


def _batches(rows: Sequence[Row]) -> str:
    """Return the bytes of unions, sizes down and batches across."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    found = {(row["size"], row["batch"]): row["cost_frac"] for row in rows}
    cells = [
        [str(size), *(number(found.get((size, batch))) for batch in batches)]
        for size in dict.fromkeys(row["size"] for row in rows)
    ]
    title = "cost_frac of a batch that reads the union of its requests' sets, by requests"
    return table(title, ["size", *map(str, batches)], cells)


def _classes(rows: Sequence[Row]) -> str:
    names = ("num_misses", "num_steps", "miss_share", "step_share", "lift")
    cells = [[row["class"], *(number(row[name]) for name in names)] for row in rows]
    return table("misses by class of the most likely token", ["class", *names], cells)


def _misses(rows: Sequence[Row]) -> str:
    cells = [
        [
            f"{row['best_prob']:.5f}",
            f"[{row['text']}]",
            row["class"],
            "the same" if row["best_id"] == row["token_id"] else f"[{row['token_text']}]",
            f"{row['sequence_id']}:{row['position']}",
            _end(row["context"]),
        ]
        for row in rows
    ]
    title = f"the surest of {rows[0]['num_misses']} misses: the most likely token was no candidate"
    columns = ["prob", "missed", "class", "recorded", "sequence", "text before"]
    return table(title, columns, cells)


def _end(text: str) -> str:
    """Return the end of a text that fits its column."""
    from rich.cells import cell_len

    line = " ".join(text.split())
    while cell_len(line) > _CONTEXT_CELLS:
        line = line[1:]
    return line
