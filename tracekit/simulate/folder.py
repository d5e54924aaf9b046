"""A results folder read back: what the run was, and its tables. Needs no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError
from tracekit.schema import RESULTS_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

    from tracekit.schema import Table

_KEYS: dict[str, tuple[str, ...]] = {
    "": (
        "tracekit_version",
        "versions",
        "command",
        "seed",
        "created",
        "trace",
        "sequences",
        "plan",
        "skipped",
        "failed",
    ),
    "trace": ("path", "run_id", "created", "host", "capture", "sampler", "spec"),
    "plan": ("kv", "vocab", "sizes", "levels", "kv_bytes"),
}
"""What ``run.json`` says at its top and in its parts; what older results lack is not among it."""

_ROW_KEYS: dict[str, tuple[str, ...]] = {
    "sequences": (
        "sequence_id",
        "prompt_id",
        "domain",
        "num_tokens",
        "context_end",
        "prompt_end",
        "finish_reason",
        "text_source",
        "num_scored",
        "mean_entropy_nats",
        "prompt_sha256",
        "tokens_sha256",
    ),
    "skipped": ("what", "sequence_id", "why"),
    "failed": ("cell", "why"),
}
"""What each row of its lists says."""


def read_run(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` of a results folder says.

    Raises
    ------
    InputError
        If there is none, it is damaged or incomplete, or its version is not the one read here.
    """
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
    if missing := _missing(run):
        msg = f"{path} lacks {', '.join(missing)}; simulate again."
        raise InputError(msg)
    found: dict[str, Any] = run
    return found


def _missing(run: dict[str, Any]) -> list[str]:
    """Return the names of what a run lacks; of its lists those of the first row that lacks any."""
    missing = []
    for part, keys in _KEYS.items():
        missing += _lacks(part, run[part] if part else run, keys)
        if missing and not part:
            return missing
    for part, keys in _ROW_KEYS.items():
        if type(run[part]) is not list:
            missing.append(part)
            continue
        rows = (_lacks(f"{part}[{at}]", row, keys) for at, row in enumerate(run[part]))
        missing += next(filter(None, rows), [])
    return missing


def _lacks(name: str, held: Any, keys: Sequence[str]) -> list[str]:
    """Return which keys something lacks, all of them where it is no table, with its name before."""
    has = held if type(held) is dict else {}
    return [f"{name}.{key}".lstrip(".") for key in keys if key not in has]


def read_table(
    folder: Path, table: Table, columns: Sequence[str] | None = None, where: Any = None
) -> pa.Table:
    """Return a table as it was written; no rows where there is no file.

    Parameters
    ----------
    folder
        The results.
    table
        Which table.
    columns
        Those of its columns that are wanted, in this order; None: all.
    where
        Rows that are wanted, an expression of ``pyarrow.compute``; None: all.

    Raises
    ------
    InputError
        If the file is damaged or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"{table.name}.parquet"
    names = list(columns or table.schema.names)
    if not path.exists():
        return table.schema.empty_table().select(names)
    try:
        if missing := set(names) - set(pq.read_schema(path).names):
            msg = f"{path} lacks the columns {', '.join(sorted(missing))}; simulate again."
            raise InputError(msg)
        return pq.read_table(path, columns=names, filters=where).select(names)
    except (OSError, pa.ArrowException) as error:
        msg = f"{path} is damaged ({' '.join(str(error).split())}): simulate again."
        raise InputError(msg) from error
