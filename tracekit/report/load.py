"""Read a results folder and check that it is one; absent tables are empty frames."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tracekit.errors import InputError
from tracekit.schema import (
    ANY,
    CALIBRATION,
    KV_RESULTS,
    RESULTS_VERSION,
    SHOWN,
    SUMMARY,
    VOCAB_RESULTS,
    Table,
)
from tracekit.simulate.calibration_cells import calibration_cells
from tracekit.spec import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

_RUN_KEYS = (
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
)
_WHOLE = 0.9995  # Kept fraction from which a policy is the full cache.
_KEY_MEASURES = {"kv": "output_error", "vocab": "hit_argmax"}


@dataclass(frozen=True)
class Point:
    """One measure of a policy or estimator at one size: a row of ``summary``.

    ``low`` and ``high`` are NaN below 3 sequences, ``target`` where nothing was asked for.
    """

    family: str
    name: str
    level: str
    target: float
    x: float
    mean: float
    low: float
    high: float
    n: int
    num_excluded: int

    @property
    def asked(self) -> float:
        """The kept fraction or size asked for; the measured one where there is none."""
        return self.x if math.isnan(self.target) else self.target

    @property
    def cell(self) -> tuple[str, str]:
        """What names the policy or estimator and its size in every measure."""
        return self.name, str(self.target)


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a simulation left: identity of the run and its tables as pandas frames.

    Parameters
    ----------
    run
        ``run.json``.
    spec
        The recorded model.
    level
        Level of truth of the KV results that are shown.
    kv
        Rows of ``schema.KV_RESULTS`` over all steps at that level.
    vocab, calibration, summary, shown
        Tables of ``tracekit.schema``, dictionary columns as strings; no rows where a file is absent.
    cells
        Policies on sequences that were run at all three levels; see ``calibration_cells``.
    """

    run: dict[str, Any]
    spec: ModelSpec
    level: str
    kv: pd.DataFrame
    vocab: pd.DataFrame
    calibration: pd.DataFrame
    summary: pd.DataFrame
    shown: pd.DataFrame
    cells: pd.DataFrame

    def curves(self, question: str, measure: str, *, domain: str = ANY) -> dict[str, list[Point]]:
        """Return one measure of all policies or estimators, over sequences.

        Parameters
        ----------
        question
            ``kv`` or ``vocab``; KV points are those of ``level`` alone that free memory, and the full
            cache, the reference of all others, is no curve.
        measure
            Column of the results.
        domain
            One domain, or ``all``.

        Returns
        -------
        dict
            By family, sorted: its points with a mean, ascending x.
        """
        rows = self.summary
        chosen = (
            (rows["question"] == question)
            & (rows["measure"] == measure)
            & (rows["domain"] == domain)
            & (rows["bucket"] == ANY)
            & rows["mean"].notna()
        )
        if question == "kv":
            chosen &= (rows["level"] == self.level) & (rows["x_name"] == "kept_frac")
        names = [field.name for field in fields(Point)]
        records = rows.loc[chosen, names].sort_values(["family", "x", "name"])
        curves: dict[str, list[Point]] = {}
        for record in records.itertuples(index=False, name=None):
            point = Point(*record)
            curves.setdefault(point.family, []).append(point)
        if question == "kv":
            return {name: curve for name, curve in curves.items() if curve[0].x < _WHOLE}
        return curves

    def methods(self, question: str, measure: str, *, domain: str = ANY) -> dict[str, list[Point]]:
        """Return the curves of what a decoder can do: bounds are never recommended."""
        rows = self.summary[self.summary["question"] == question]
        bounds = set(rows.loc[~rows["causal"].astype(bool), "family"])
        curves = self.curves(question, measure, domain=domain)
        return {name: curve for name, curve in curves.items() if name not in bounds}

    def means(self, question: str, measure: str) -> dict[tuple[str, str], float]:
        """Return the means of one measure over all sequences, by ``Point.cell``."""
        curves = self.curves(question, measure)
        return {point.cell: point.mean for curve in curves.values() for point in curve}

    def has(self, question: str) -> bool:
        """Whether there are points for ``kv`` or ``vocab``."""
        return bool(self.curves(question, _KEY_MEASURES[question]))

    def domains(self, question: str) -> list[str]:
        """Return the domains that have points for a question, sorted."""
        rows = self.summary
        found = rows.loc[(rows["question"] == question) & rows["mean"].notna(), "domain"]
        return sorted(set(found) - {ANY})


def load_results(folder: Path) -> Results:
    """Read a results folder.

    Parameters
    ----------
    folder
        What ``tracekit simulate`` wrote.

    Raises
    ------
    InputError
        If it is no results folder, of another schema version, damaged, or without any result.
    """
    run = _read_run(folder)
    tables = (KV_RESULTS, VOCAB_RESULTS, CALIBRATION, SUMMARY, SHOWN)
    frames = {table.name: _read_table(folder, table) for table in tables}
    kv = frames["kv"][frames["kv"]["steps"] == ANY]
    level = _shown_level(run, set(kv["level"]))
    frames |= {"kv": kv[kv["level"] == level], "cells": calibration_cells(kv)}
    if frames["summary"]["mean"].notna().sum() == 0:
        msg = (
            f"{folder} holds no finished result of a policy or an estimator "
            f"({len(run['failed'])} failed and {len(run['skipped'])} skipped cells); run tracekit "
            "simulate again into it with --kv or --vocab (tracekit show prints layers)."
        )
        raise InputError(msg)
    try:
        spec = ModelSpec.from_json(run["trace"]["spec"])
    except (KeyError, TypeError) as error:
        msg = f"{folder / 'run.json'} holds no valid model spec ({error}); simulate again."
        raise InputError(msg) from error
    return Results(run=run, spec=spec, level=level, **frames)


def _shown_level(run: dict[str, Any], levels: set[str]) -> str:
    """Return local where there is such a row, since the curves are of the attention output."""
    if "local" in levels or not levels:
        return "local"
    return str(run["plan"]["levels"][0])


def _read_run(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = (
            f"{folder} is no results folder: run.json cannot be read; run tracekit simulate first."
        )
        raise InputError(msg) from error
    except ValueError as error:
        msg = f"{path} is damaged ({error}); delete the folder and simulate again."
        raise InputError(msg) from error
    version = run.get("schema_version") if type(run) is dict else None
    if version != RESULTS_VERSION:
        msg = (
            f"{path} has schema version {version}, this tracekit reads {RESULTS_VERSION}; "
            "simulate again with this version."
        )
        raise InputError(msg)
    if missing := [key for key in _RUN_KEYS if key not in run]:
        msg = f"{path} lacks {', '.join(missing)}; run tracekit simulate again."
        raise InputError(msg)
    return run


def _read_table(folder: Path, table: Table) -> pd.DataFrame:
    """Return one table as a frame with plain strings; no rows if the file is absent."""
    path = folder / f"{table.name}.parquet"
    if not path.exists():
        return _plain(table.schema.empty_table())
    try:
        read = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        msg = f"{path} cannot be read ({error}); delete it and run tracekit simulate again."
        raise InputError(msg) from error
    if missing := {column.name for column in table.columns} - set(read.column_names):
        msg = f"{path} lacks the columns {', '.join(sorted(missing))}; simulate again."
        raise InputError(msg)
    return _plain(read)


def _plain(table: pa.Table) -> pd.DataFrame:
    """Return a frame whose dictionary columns are strings: categories would sort by code."""
    schema = [
        field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    frame: pd.DataFrame = table.cast(pa.schema(schema)).to_pandas()
    return frame
