"""A results folder: ``run.json``, one file a finished cell, and the tables made of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tracekit.errors import InputError
from tracekit.trace import layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tracekit.schema import Table

RUN = "run.json"
CELLS = "cells"


class Cells:
    """The finished cells of a results folder; several processes may write them.

    Parameters
    ----------
    path
        The results folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / CELLS
        self._path.mkdir(parents=True, exist_ok=True)

    def has(self, key: str, num_tables: int = 1) -> bool:
        """Whether all tables of a cell are there; one that cannot be read is deleted."""
        return all(self._can_read(self.part(key, place)) for place in range(num_tables))

    def _can_read(self, key: str) -> bool:
        path = self._cell(key)
        if not path.exists():
            return False
        try:
            pq.read_metadata(path)
        except (OSError, pa.ArrowInvalid):
            path.unlink()
            return False
        return True

    def part(self, key: str, place: int) -> str:
        """Return the key of one of the tables of a cell; the first one's is the cell's own."""
        return f"{key}-{place}" if place else key

    def write(self, key: str, tables: Sequence[pa.Table]) -> None:
        """Write the tables of a finished cell: whole, or not there."""
        for place, rows in reversed(
            list(enumerate(tables))
        ):  # the first one says that all are there
            _write(self._cell(self.part(key, place)), rows)

    def read(self, keys: list[str], table: Table) -> pa.Table:
        """Return the rows of finished cells, in the order of the keys."""
        parts = [pq.read_table(self._cell(key), schema=table.schema) for key in keys]
        if not parts:
            return table.schema.empty_table()
        return pa.concat_tables(parts).unify_dictionaries().combine_chunks()

    def _cell(self, key: str) -> Path:
        return self._path / f"{key}.parquet"


class Results:
    """A results folder being filled.

    Parameters
    ----------
    path
        New, empty, or the results of the same trace.
    run
        Content of ``run.json``.

    Raises
    ------
    InputError
        If the folder holds something else, or results of another trace.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path = path
        self._run = dict(run)
        _refuse_foreign(path, self._run)
        self.cells = Cells(path)
        self.write_run()

    def write_run(self, **entries: Any) -> None:
        """Write ``run.json``, with more entries."""
        self._run.update(entries)
        layout.write_json(self.path / RUN, self._run)

    def read_table(self, table: Table) -> pa.Table:
        """Return a collected table; an empty one if it was not written."""
        path = self.path / f"{table.name}.parquet"
        return pq.read_table(path) if path.exists() else table.schema.empty_table()

    def write_table(self, table: Table, rows: pa.Table) -> None:
        """Write a collected table; an empty one removes the file."""
        path = self.path / f"{table.name}.parquet"
        if rows.num_rows:
            _write(path, rows)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, rows: pa.Table) -> None:
    temporary = path.with_suffix(".tmp")
    pq.write_table(rows, temporary, compression="zstd")
    temporary.replace(path)


def _refuse_foreign(path: Path, run: Mapping[str, Any]) -> None:
    """Raise if the folder is not this trace's to write results into."""
    if path.exists() and not path.is_dir():
        msg = f"{path} is a file; give -o a folder."
        raise InputError(msg)
    if not path.exists() or not any(path.iterdir()):
        return
    try:
        there = json.loads((path / RUN).read_text(encoding="utf-8"))
        theirs = there["trace"]["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        msg = f"{path} holds something that is no results folder; give -o a new or empty folder."
        raise InputError(msg) from None
    if there.get("schema_version") != run["schema_version"]:
        msg = (
            f"{path} holds results of version {there.get('schema_version')}, this tracekit writes "
            f"{run['schema_version']}; give -o another folder."
        )
        raise InputError(msg)
    if theirs != run["trace"]["run_id"]:
        msg = f"{path} holds results of another trace (run {theirs}); give -o another folder."
        raise InputError(msg)
