"""A results folder as ``tracekit show`` reads it: what the run was, and rows of its tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.schema import Table

Row = dict[str, Any]


def read_run(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` of a results folder says.

    Raises
    ------
    InputError
        If there is none, it is damaged, or its version is not the one that is read here.
    """
    from tracekit.errors import InputError
    from tracekit.schema import RESULTS_VERSION

    path = folder / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"{folder} is no results folder (it has no run.json): run tracekit simulate first."
        raise InputError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} is damaged ({error}); delete the folder and simulate again."
        raise InputError(msg) from error
    version = run.get("schema_version") if type(run) is dict else None
    if version != RESULTS_VERSION:
        msg = (
            f"{folder} holds results of version {version}, this tracekit reads {RESULTS_VERSION}; "
            "run tracekit simulate into a new folder."
        )
        raise InputError(msg)
    found: dict[str, Any] = run
    return found


def read_rows(folder: Path, of: Table, **equal: str) -> list[Row]:
    """Return the rows of a table with these texts in these columns; none if it was not written.

    Raises
    ------
    InputError
        If the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from tracekit.errors import InputError

    path = folder / f"{of.name}.parquet"
    if not path.exists():
        return []
    try:
        rows = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        msg = f"{path} is damaged ({' '.join(str(error).split())}): simulate again."
        raise InputError(msg) from error
    for name, value in equal.items():
        rows = rows.filter(pc.equal(rows[name].cast(pa.string()), value))
    found: list[Row] = rows.to_pylist()
    return found
