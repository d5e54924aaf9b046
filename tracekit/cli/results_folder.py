"""Rows of the tables of a results folder, as ``tracekit show`` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.schema import Table

Row = dict[str, Any]


def read_rows(folder: Path, of: Table, **equal: str) -> list[Row]:
    """Return the rows of a table with these texts in these columns; none if it was not written.

    Raises
    ------
    InputError
        If the file is damaged or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from tracekit.simulate.folder import read_table

    rows = read_table(folder, of)
    for name, value in equal.items():
        rows = rows.filter(pc.equal(rows[name].cast(pa.string()), value))
    found: list[Row] = rows.to_pylist()
    return found
