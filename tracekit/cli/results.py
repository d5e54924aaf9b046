"""``tracekit show RESULTS``: the tables of a results folder, as text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tracekit.schema import ANY, RECOMMENDED, RESULTS_VERSION, STACKING, SUMMARY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from tracekit.schema import Table

_KINDS = (
    ("kv", "kept_frac", ("kept_frac", "output_error", "mass_kept", "oracle_overlap")),
    ("kv", "read_frac", ("read_frac", "output_error", "mass_kept", "topk_overlap", "hit_frac")),
    ("vocab", "size", ("hit_argmax", "mass", "cost_frac")),
)
"""Question, axis, and the measures that are shown of it."""

_PLAIN = ("kept_frac", "read_frac", "cost_frac", "topk_overlap", "oracle_overlap", "hit_frac")
"""Measures that are shown without their interval."""


def read_results(folder: Path) -> tuple[dict[str, Any], str]:
    """Return a results folder as data, and as text.

    Raises
    ------
    InputError
        If it is damaged.
    """
    from tracekit.errors import InputError

    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{folder / 'run.json'} is damaged ({error}); delete the folder and simulate again."
        raise InputError(msg) from error
    if run.get("schema_version") != RESULTS_VERSION:
        msg = (
            f"{folder} holds results of version {run.get('schema_version')}, this tracekit reads "
            f"{RESULTS_VERSION}; run tracekit simulate into a new folder."
        )
        raise InputError(msg)
    summary = _rows(folder, SUMMARY)
    rows = [row for row in summary if row["domain"] == ANY and row["bucket"] == ANY]
    stacking, recommended = _rows(folder, STACKING), _rows(folder, RECOMMENDED)
    parts = [f"{folder}: {len(run['sequences'])} sequences of {run['trace']['path']}"]
    parts += [f"failed {one['cell']}: {one['why']}" for one in run["failed"]]
    parts += [text for kind in _KINDS if (text := _summary(rows, *kind))]
    parts += [_stacking(stacking)] if stacking else []
    parts += [_recommended(recommended)] if recommended else []
    data = {
        "results": str(folder),
        "run": run,
        "summary": rows,
        "stacking": stacking,
        "recommended": recommended,
    }
    return data, "\n\n".join(parts)


def _rows(folder: Path, table: Table) -> list[dict[str, Any]]:
    """Return the rows of a table; none if it was not written."""
    import pyarrow.parquet as pq

    path = folder / f"{table.name}.parquet"
    if not path.exists():
        return []
    frame: pd.DataFrame = pq.read_table(path).to_pandas()
    rows: list[dict[str, Any]] = json.loads(str(frame.to_json(orient="records")))
    return rows


def _summary(
    rows: list[dict[str, Any]], question: str, axis: str, measures: Sequence[str]
) -> str | None:
    """Return the table of one question on one axis; None if there is nothing."""
    from tracekit.cli.output import table

    found: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["question"] == question and row["x_name"] == axis:
            found.setdefault((row["family"], row["x"]), {})[row["measure"]] = row
    if not found:
        return None
    used = [one for one in measures if any(_has(cell.get(one)) for cell in found.values())]
    size = ["size"] if axis == "size" else []
    cells = [
        [
            _name(name, next(iter(cell.values()))),
            *([f"{x:.0f}"] if size else []),
            *(_interval(cell.get(one)) for one in used),
            str(max(row["n"] for row in cell.values())),
        ]
        for (name, x), cell in sorted(found.items())
    ]
    level = next(iter(next(iter(found.values())).values()))["level"]
    return table(f"{question}, level {level}", ["name", *size, *used, "n"], cells)


def _name(name: str, row: dict[str, Any]) -> str:
    """Return the name, bounds named so."""
    return f"{name} (bound)" if row["causal"] is False else name


def _stacking(rows: list[dict[str, Any]]) -> str:
    """Return what eviction and transform cost alone and together."""
    from tracekit.cli.output import number, table

    cells = [
        [
            _short(row["policy"]),
            number(row["kept_frac"]),
            *(number(row[f"{one}_mean"]) for one in ("eviction", "transform", "together")),
            _range(row["interaction"], row["low"], row["high"]),
            {True: "do not stack", False: "may be stacked", None: "-"}[row["exceeds_error_bound"]],
            str(row["n"]),
        ]
        for row in rows
        if row["measure"] == "output_error_sq"
    ]
    columns = ["stacked", "kept_frac", "evicted", "transformed", "together", "interaction", "rule"]
    title = (
        f"stacking, squared output error, level {rows[0]['level']}; rule: the transform alone stays "
        f"below an output error of {rows[0]['error_bound']:g}"
    )
    return table(title, [*columns, "n"], cells)


def _short(text: str) -> str:
    """Return a policy's text with its amount alone."""
    from tracekit.kv.parse import parse

    policy = parse(text)
    amount = text.partition("kept=")[2].partition(",")[0]
    return f"{policy.family} at {amount}"


def _recommended(rows: list[dict[str, Any]]) -> str:
    """Return the kept fraction that attention suggests for each layer, and why."""
    from tracekit.cli.output import number, table

    evidence = ("mean_frac", "oracle_frac", "keys_95_frac", "first_4_mass")
    cells = [
        [
            str(row["layer"]),
            _range(row["kept_frac"], row["low"], row["high"]),
            *(number(row[one]) for one in evidence),
            str(row["n"]),
        ]
        for row in rows
    ]
    first = rows[0]
    title = (
        f"kept fraction by layer for {first['mass_frac']:.0%} of later attention in "
        f"{first['quantile']:.0%} of rows and sequences, level {first['level']}"
    )
    return table(title, ["layer", "kept_frac", *evidence, "n"], cells)


def _has(row: dict[str, Any] | None) -> bool:
    return row is not None and row["mean"] is not None


def _interval(row: dict[str, Any] | None) -> str:
    """Return a mean with its 95 % interval, if there is one."""
    from tracekit.cli.output import number

    if row is None:
        return "-"
    if row["measure"] in _PLAIN:
        return number(row["mean"])
    return _range(row["mean"], row["low"], row["high"])


def _range(mean: float | None, low: float | None, high: float | None) -> str:
    from tracekit.cli.output import number

    if low is None or high is None:
        return number(mean)
    return f"{number(mean)} [{number(low)}, {number(high)}]"
