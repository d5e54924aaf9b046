"""Results as a report reads them: tables as pandas frames, read when they are first wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.errors import InputError
from tracekit.report.frames import read_frame, read_part
from tracekit.schema import ALL, ANY, KV_RESULTS, SUMMARY, Table
from tracekit.simulate.folder import read_run
from tracekit.simulate.lengths import LENGTHS
from tracekit.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

LEVELS = ("local", "predicted", "propagated", "generated")
"""Levels of truth, in the order of what they say."""

KEY_MEASURES = {
    "local": "output_error",
    "predicted": "kl_predicted_nats",
    "propagated": "kl_nats",
    "generated": "kl_nats",
}
"""By level, the measure that policies are compared by."""

_ANSWERS = (schema.SUMMARY, schema.LAYER_SUMMARY, schema.ATTENTION_RESULTS)
"""Tables of which one at least must have rows."""

_OF_LAYER = (
    *("sequence_id", "family", "policy", "level", "layer", "kv_head"),
    *("target_frac", "num_evicted", "is_idle", "output_error"),
)
"""What is read of single layers and heads: they are most of the rows."""

_WHOLE = 0.9995  # Kept fraction from which a policy is the full cache.


@dataclass(frozen=True)
class Point:
    """One measure of a policy or estimator at one size: a row of ``summary``.

    ``low`` and ``high`` are NaN below 3 sequences, ``target`` where nothing was asked for.
    """

    family: str
    name: str
    level: str
    causal: bool
    x_name: str
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
    """What a simulation left: identity of the run, and its tables as pandas frames.

    Parameters
    ----------
    folder
        Where it is.
    run
        ``run.json``.
    spec
        The recorded model.
    """

    folder: Path
    run: dict[str, Any]
    spec: ModelSpec
    _frames: dict[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    def table(self, table: Table) -> pd.DataFrame:
        """Return a table of ``tracekit.schema``: texts as strings, no rows where there is no file.

        It is read once and shared: do not change it.

        Raises
        ------
        InputError
            If its file is damaged or lacks a column.
        """
        if table.name not in self._frames:
            self._frames[table.name] = read_frame(self.folder, table)
        return self._frames[table.name]

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Means over sequences, rows of ``schema.SUMMARY``."""
        return self.table(SUMMARY)

    @cached_property
    def whole(self) -> pd.DataFrame:
        """Rows of ``schema.KV_RESULTS`` of all layers, heads and steps together, at all levels."""
        return read_part(self.folder, KV_RESULTS, steps=ANY, layer=ALL, kv_head=ALL)

    @cached_property
    def kv(self) -> pd.DataFrame:
        """Rows by layer and head at level local, over all steps, with what tells their error."""
        return read_part(self.folder, KV_RESULTS, _OF_LAYER, steps=ANY, level="local")

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """Levels of truth that the KV results have, in the order of ``LEVELS``."""
        rows = self.summary
        there = set(rows.loc[rows["question"] == "kv", "level"])
        return tuple(level for level in LEVELS if level in there)

    @cached_property
    def _sorted(self) -> pd.DataFrame:
        """Rows of the summary with a mean, points of a curve one after the other."""
        rows = self.summary[self.summary["mean"].notna()]
        return rows.sort_values(["family", "x", "name"], ignore_index=True)

    @cached_property
    def _points(self) -> list[Point]:
        names = [one.name for one in fields(Point)]
        return [Point(*row) for row in self._sorted[names].itertuples(index=False, name=None)]

    @cached_property
    def _cells(self) -> Mapping[Any, Any]:
        """By question, measure, level, domain, bucket and what x is: places in ``_points``."""
        keys = ["question", "measure", "level", "domain", "bucket", "x_name"]
        return self._sorted.groupby(keys).indices

    def families(self, question: str) -> list[str]:
        """Return all policies (``kv``) or estimators (``vocab``), sorted; for styles."""
        rows = self.summary
        return sorted(set(rows.loc[rows["question"] == question, "family"]))

    def curves(
        self,
        question: str,
        measure: str,
        *,
        level: str = "local",
        domain: str = ANY,
        bucket: str = ANY,
        x_name: str = "kept_frac",
    ) -> dict[str, list[Point]]:
        """Return one measure of all policies or estimators, over sequences.

        Parameters
        ----------
        question
            ``kv`` or ``vocab``. The full cache, the reference of all other policies, is no curve.
        measure
            Column of the results.
        level
            One level of truth; levels are never mixed.
        domain, bucket
            One domain or one length bucket, or ``all``; not both at once.
        x_name
            Of KV results: ``kept_frac`` for what frees memory, ``read_frac`` for what reads less.

        Returns
        -------
        dict
            By family, sorted: its points with a mean, ascending x.
        """
        x_name = x_name if question == "kv" else "size"
        curves: dict[str, list[Point]] = {}
        for place in self._cells.get((question, measure, level, domain, bucket, x_name), ()):
            point = self._points[place]
            curves.setdefault(point.family, []).append(point)
        if question == "kv":
            return {name: curve for name, curve in curves.items() if curve[0].x < _WHOLE}
        return curves

    def methods(
        self,
        question: str,
        measure: str,
        **part: str,
    ) -> dict[str, list[Point]]:
        """Return the ``curves`` of what a decoder can do: bounds are never recommended."""
        curves = self.curves(question, measure, **part)
        return {name: curve for name, curve in curves.items() if curve[0].causal}

    def at(self, question: str, measure: str, **part: str) -> dict[tuple[str, str], Point]:
        """Return the points of ``curves`` by ``Point.cell``, the same in all measures and parts."""
        curves = self.curves(question, measure, **part)
        return {point.cell: point for curve in curves.values() for point in curve}

    def means(
        self, question: str, measure: str, *, level: str = "local"
    ) -> dict[tuple[str, str], float]:
        """Return the means of one measure over all sequences, by ``Point.cell``."""
        return {cell: one.mean for cell, one in self.at(question, measure, level=level).items()}

    def domains(self, question: str) -> list[str]:
        """Return the domains that have points for a question, sorted."""
        return self._parts(question, "domain")

    def buckets(self, question: str) -> list[str]:
        """Return the length buckets that have points for a question, shortest first."""
        there = self._parts(question, "bucket")
        return sorted(there, key=lambda one: (LENGTHS.index(one) if one in LENGTHS else -1, one))

    def _parts(self, question: str, column: str) -> list[str]:
        rows = self.summary
        found = rows.loc[(rows["question"] == question) & rows["mean"].notna(), column]
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
        If it is no results folder, of another schema version, damaged, unfinished, or without any
        result.
    """
    run = read_run(folder)
    # Older results do not say whether they are finished.
    if not run.get("finished", True):
        msg = (
            f"{folder} is unfinished: its simulation still runs or was stopped before its tables were "
            "collected; run the same tracekit simulate again into it, which keeps what is done."
        )
        raise InputError(msg)
    try:
        spec = ModelSpec.from_json(run["trace"]["spec"])
    except (KeyError, TypeError) as error:
        msg = f"{folder / 'run.json'} holds no valid model spec ({error}); simulate again."
        raise InputError(msg) from error
    results = Results(folder=folder, run=run, spec=spec)
    if all(results.table(one).empty for one in _ANSWERS):
        msg = (
            f"{folder} holds no finished result ({len(run['failed'])} failed and "
            f"{len(run['skipped'])} skipped cells); run tracekit simulate again into it."
        )
        raise InputError(msg)
    return results
