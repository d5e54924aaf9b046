"""Tables of a results folder as pandas frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracekit.simulate.folder import read_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from tracekit.schema import Table

_PIECE_ROWS = 65_536


def read_frame(
    folder: Path, table: Table, columns: Sequence[str] | None = None, where: Any = None
) -> pd.DataFrame:
    """Return what ``read_table`` reads as a frame whose dictionary columns are strings.

    Categories would sort by code.
    """
    return _frame(read_table(folder, table, columns, where))


def read_part(
    folder: Path, table: Table, columns: Sequence[str] | None = None, **equal: str | int
) -> pd.DataFrame:
    """Return the rows in which columns have given values, of a table that is large as a whole.

    It is read in pieces: ``read_table`` holds all of a file's rows before it drops some.

    Parameters
    ----------
    folder, table, columns
        As of ``read_table``.
    equal
        By column, the value of the rows that are wanted.

    Raises
    ------
    InputError
        If the file is damaged or lacks a column.
    """
    names = list(columns or table.schema.names)
    where = pc.scalar(True)
    for name, value in equal.items():
        where = where & (pc.field(name) == value)
    read = list(dict.fromkeys([*names, *equal]))
    none = read_table(folder, table, read, pc.scalar(False))
    path = folder / f"{table.name}.parquet"
    if not path.exists():
        return _frame(none.select(names))
    try:
        with pq.ParquetFile(path) as file:
            pieces = [
                pa.Table.from_batches([one]).filter(where).select(names)
                for one in file.iter_batches(_PIECE_ROWS, columns=read)
            ]
    except (OSError, pa.ArrowException):
        return _frame(read_table(folder, table, names, where))  # It says what is wrong.
    return _frame(pa.concat_tables([none.select(names), *pieces]))


def _frame(rows: pa.Table) -> pd.DataFrame:
    plain = [
        one.with_type(pa.string()) if pa.types.is_dictionary(one.type) else one
        for one in rows.schema
    ]
    frame: pd.DataFrame = rows.cast(pa.schema(plain)).to_pandas()
    return frame
