"""Rows on candidate sets read from a results folder, and the brief table of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit.cli.output import number, range_text, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tracekit.schema import Table

Row = dict[str, Any]

CEILING = "ceiling: how many times faster a whole step gets at most, by the bytes of the weights"


def read_rows(folder: Path, of: Table, **equal: str) -> list[Row]:
    """Return the rows of a table with these texts in these columns; none if it was not written."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = folder / f"{of.name}.parquet"
    if not path.exists():
        return []
    rows = pq.read_table(path)
    for name, value in equal.items():
        rows = rows.filter(pc.equal(rows[name].cast(pa.string()), value))
    found: list[Row] = rows.to_pylist()
    return found


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


def brief_table(
    title: str,
    records: Sequence[Row],
    share: float | None,
    named: Mapping[str, Callable[[Row], str]],
) -> str:
    """Return a line for each cell and group of statistics.

    Parameters
    ----------
    title
        Over the table.
    records
        Rows of ``schema.CANDIDATE_STATS``, those of a cell and group together.
    share
        The head's part of the bytes.
    named
        First columns: how they are read from a row.
    """
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in records:
        key = tuple(row[name] for name in ("estimator", "controller", "fit", "group", "size"))
        lines.setdefault(key, {})[row["statistic"]] = row
    cells = [
        [
            *(read(found["hit_argmax"]) for read in named.values()),
            range_text(*(found["hit_argmax"][name] for name in ("value", "low", "high"))),
            number(found["hit_chosen"]["value"]),
            number(found["mass"]["value"]),
            number(found["neg_log_mass_mean"]["value"]),
            f"{found['set_size_mean']['value']:.0f}",
            number(cost := found["cost_frac"]["value"] if "cost_frac" in found else None),
            ceiling_text(share, cost),
            str(found["hit_argmax"]["n"]),
        ]
        for found in lines.values()
    ]
    columns = ["hit_argmax", "chosen", "mass", "-ln m", "set", "cost_frac", "ceiling", "n"]
    shown = [*named, *columns]
    # What no row has takes no room.
    used = [place for place in range(len(shown)) if any(row[place] != "-" for row in cells)]
    return table(title, [shown[one] for one in used], [[row[one] for one in used] for row in cells])
