"""How the loss grows with the distance from the eviction point, on the same sequences."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES, bootstrap_mean
from tracekit.report.figures.bucket_curve import Buckets
from tracekit.report.formats import count, percent
from tracekit.report.load import Point, plain
from tracekit.simulate.folder import read_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from tracekit.report.figures.measure import Measure
    from tracekit.report.load import Results

NAME = "loss-by-distance"


def distance_rows(results: Results) -> pd.DataFrame:
    """Return rows of ``schema.KV_RESULTS`` by steps after the eviction point, of all layers."""
    rows = read_table(results.folder, schema.KV_RESULTS)
    of_all = pc.and_(pc.equal(rows["layer"], schema.ALL), pc.equal(rows["kv_head"], schema.ALL))
    by_steps = pc.not_equal(rows["steps"].cast(pa.string()), schema.ANY)
    return plain(rows.filter(pc.and_(of_all, by_steps)))


def distance_curve(
    rows: pd.DataFrame, measure: Measure, chosen: Mapping[str, Point], seed: int
) -> Buckets | None:
    """Return the loss by bucket of steps; None below two buckets.

    Every point is a mean over the same sequences: those that reach the last bucket that
    ``MIN_SEQUENCES`` of them reach (the last of all where none has so many), and in which the policy
    evicted something. Else the longest texts alone would make the end of a line.

    Parameters
    ----------
    rows
        From ``distance_rows``.
    measure
        What is shown; its level alone is read.
    chosen
        By family, the policy that is shown.
    seed
        Of the bootstrap.
    """
    there = rows[(rows["level"] == measure.level) & rows[measure.column].notna()]
    there = there[there["policy"].isin({point.name for point in chosen.values()})]
    there = there[~there["is_idle"].astype(bool) | (there["target_frac"] >= 1)]
    labels = _labels(there)
    if len(labels) < 2:
        return None
    long = there[there["steps"].isin(labels)]
    reached = long.groupby("sequence_id")["steps"].nunique()
    same = long[long["sequence_id"].isin(reached.index[reached == len(labels)])]
    points = {}
    for family, point in sorted(chosen.items()):
        if curve := _curve(same[same["policy"] == point.name], measure, point, labels, seed):
            points[family] = curve
    if not points:
        return None
    left = there["sequence_id"].nunique() - same["sequence_id"].nunique()
    shown = ", ".join(f"{name} {percent(chosen[name].x)}" for name in points)
    return Buckets(
        name=NAME,
        measure=measure,
        axis="steps after the eviction point",
        labels=labels,
        points=points,
        kept={name: chosen[name].x for name in points},
        note=(
            f"Each policy at its kept fraction nearest a half ({shown}). All points of a line are "
            f"means over the same sequences; {count(left)} that end earlier are left out."
        ),
    )


def _labels(rows: pd.DataFrame) -> list[str]:
    """Return the buckets up to the last that enough sequences reach, nearest first."""
    reach = rows.groupby("steps")["sequence_id"].nunique()
    order = sorted(reach.index, key=lambda one: int(re.findall(r"\d+", one)[0]))
    far = [number for number, one in enumerate(order) if reach[one] >= MIN_SEQUENCES]
    return [str(one) for one in order[: far[-1] + 1 if far else None]]


def _curve(
    rows: pd.DataFrame, measure: Measure, shown: Point, labels: list[str], seed: int
) -> list[Point]:
    """Return the points of one policy, of sequences that have all buckets."""
    values = rows.pivot_table(index="sequence_id", columns="steps", values=measure.column)
    values = values.reindex(columns=labels).dropna()
    if values.empty:
        return []
    made = []
    for number, label in enumerate(labels):
        mean = bootstrap_mean(values[label].to_numpy(np.float64), seed=seed)
        low, high = (np.nan if end is None else end for end in (mean.low, mean.high))
        exact = float(values[label].mean())
        made.append(
            replace(shown, x=number, mean=exact, low=float(low), high=float(high), n=mean.n)
        )
    return made
