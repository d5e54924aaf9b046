"""Rows on candidate sets of a results folder, and the tables that compare them."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

from tracekit.cli.output import WIDTH, number, range_text, share_text, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracekit.cli.results_folder import Row

Found = dict[str, "Row"]
"""Rows of ``schema.CANDIDATE_STATS`` on one cell and group, by statistic."""

CEILING = "ceiling: how many times faster a whole step gets at most, by the bytes of the weights"

_GAP = 2
_NARROWEST = 10
"""Columns that a name has at least."""


def at_size(rows: Sequence[Row], size: int | None) -> list[Row]:
    """Return the rows of one size, or all."""
    return [row for row in rows if size in (None, row["size"])]


def of_size(rows: Sequence[Row], size: int | None) -> list[Row]:
    """Return the rows of one size, or all.

    Raises
    ------
    InputError
        If there is no row of that size.
    """
    from tracekit.errors import InputError

    if found := at_size(rows, size):
        return found
    sizes = sorted({row["size"] for row in rows})
    msg = f"there are no sets of {size} tokens: choose one of {', '.join(map(str, sizes))}."
    raise InputError(msg)


def head_share(times: Sequence[Row]) -> float | None:
    """Return the head's part of the weight bytes that a step reads, if it is known.

    Parameters
    ----------
    times
        Rows of ``schema.HEAD_TIMES``.
    """
    return times[0]["head_share"] if times else None


def ceiling_text(share: float | None, cost_frac: float | None) -> str:
    """Return how many times faster a step gets at most; a dash where it is not known."""
    from tracekit.measure.ceiling import ceiling

    if share is None or cost_frac is None or share >= 1:
        return "-"
    return number(ceiling(share, cost_frac))


def by_cell(records: Sequence[Row]) -> list[Found]:
    """Return the statistics of each cell and group together, in order."""
    found: dict[tuple[Any, ...], Found] = {}
    for row in records:
        key = tuple(row[name] for name in ("estimator", "controller", "fit", "group", "size"))
        found.setdefault(key, {})[row["statistic"]] = row
    return list(found.values())


def brief_table(
    title: str,
    cells: Sequence[Found],
    share: float | None,
    named: Mapping[str, Callable[[Found], str]],
) -> str:
    """Return a line for each cell and group of statistics.

    Parameters
    ----------
    title
        Over the table.
    cells
        Statistics, each cell's and group's together.
    share
        The head's part of the bytes.
    named
        First columns: how they are read from a cell. The first of them is broken where it is too
        wide, so that numbers never are.
    """
    lines = [[*(read(one) for read in named.values()), *_numbers(one, share)] for one in cells]
    shown = [*named, *_COLUMNS]
    # What no cell has takes no room.
    used = [place for place in range(len(shown)) if any(line[place] for line in lines)]
    columns, lines = [shown[one] for one in used], [[line[one] for one in used] for line in lines]
    taken = [max(map(len, column)) + _GAP for column in zip(columns, *lines, strict=True)]
    room = max(WIDTH - sum(taken[1:]) - _GAP, _NARROWEST)
    for line in lines:
        line[0] = "\n".join(_broken(line[0], room))
    return table(title, columns, lines, gap=_GAP)


def _broken(name: str, room: int) -> list[str]:
    """Return a name in lines that fit: broken between its parts, a part alone where it must be."""
    lines = [""]
    for part in _PARTS.split(name):
        if len(lines[-1] + part.rstrip()) <= room:
            lines[-1] += part
            continue
        cut = [part[start : start + room] for start in range(0, len(part), room)]
        lines = [*filter(None, lines), *cut]
    return [line.rstrip() for line in lines]


_PARTS = re.compile(r"(?<=[+ ])|(?=[@:,])")
"""Where the text of a scheme may be broken: behind + and blanks, before what leads parameters in."""


_COLUMNS = (
    *("hit_argmax", "mass", "-ln m", "set"),
    *("bytes", "full", "ceiling", "n"),
)


def _numbers(found: Found, share: float | None) -> list[str]:
    """Return what ``_COLUMNS`` say of a cell; empty where it is not told, or no step fell back."""
    hit = found["hit_argmax"]
    told = {name: row["value"] for name, row in found.items()}
    is_spent = "cost_frac" in told
    ends = "" if hit["low"] is None else f" [{share_text(hit['low'])}, {share_text(hit['high'])}]"
    return [
        f"{share_text(hit['value'])}{ends}",
        share_text(told["mass"]),
        number(told["neg_log_mass_mean"]),
        f"{told['set_size_mean']:.0f}",
        number(told["cost_frac"]) if is_spent else "",
        share_text(told["fallback_frac"]) if told["fallback_frac"] else "",
        ceiling_text(share, told["cost_frac"]) if is_spent else "",
        str(hit["n"]),
    ]


LEGEND = (
    "(bound): reads the step's own logits, or what the full head gave at earlier steps, which a "
    "decoder that prunes does not have; hit_argmax: the most likely token is a candidate; mass: the candidates' probability m, draft "
    "acceptance; bytes: cost_frac, what is read over what the full head reads; "
    f"full: steps at which it was run after all; {CEILING}"
)


def gain_tables(told: Sequence[Row]) -> list[str]:
    """Return what a controller gains as text: all means, and differences with their intervals."""
    from tracekit.simulate.controller_gains import BASELINES, FITS

    cells = [[row["measure"], str(row["size"])] for row in told]
    means = [
        [text for fit in FITS for text in (number(row[fit], 4), str(row[f"num_sequences_{fit}"]))]
        for row in told
    ]
    changes = [[text for one in BASELINES for text in _texts(row, one)] for row in told]
    heads = [head for one in BASELINES for head in (f"own - {one}", "n")]
    tables = (
        ("means over all steps alike", [head for fit in FITS for head in (fit, "n")], means),
        ("differences on the same sequences", heads, changes),
    )
    said = (
        "What the controller gains over a fixed set of the same mean size, and what of it is timing. "
        "The sizes of own and shuffled are hindsight: no decoder has them."
    )
    return [
        textwrap.fill(said, WIDTH),
        *(
            table(
                title,
                ["measure", "size", *names],
                [[*first, *rest] for first, rest in zip(cells, texts, strict=True)],
                gap=_GAP,
            )
            for title, names, texts in tables
        ),
    ]


def _texts(row: Row, baseline: str) -> tuple[str, str]:
    ends = (row[f"{end}_{baseline}"] for end in ("low", "high"))
    return range_text(row[f"own_minus_{baseline}"], *ends), str(row[f"n_{baseline}"])
