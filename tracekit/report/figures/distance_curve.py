"""How the loss grows with the distance from the eviction point, on the same sequences."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES, bootstrap_mean
from tracekit.report.figures.bucket_curve import Buckets
from tracekit.report.figures.measure import KEY
from tracekit.report.formats import count, percent
from tracekit.report.frames import read_frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from tracekit.report.figures.measure import Measure
    from tracekit.report.load import Point, Results

NAME = "loss-by-distance"

_SAID = (
    "sequence_id",
    "policy",
    "level",
    "steps",
    "is_idle",
    "target_frac",
    "kept_frac",
    "num_scored",
)
_COLUMNS = (*_SAID, *(one.column for one in KEY.values()))


def distance_rows(results: Results) -> pd.DataFrame:
    """Return rows of ``schema.KV_RESULTS`` by steps after the eviction point, of all layers."""
    of_all = (pc.field("layer") == schema.ALL) & (pc.field("kv_head") == schema.ALL)
    where = of_all & (pc.field("steps") != schema.ANY)
    return read_frame(results.folder, schema.KV_RESULTS, _COLUMNS, where)


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
    points, kept = {}, {}
    for family, point in sorted(chosen.items()):
        rows = same[same["policy"] == point.name]
        if curve := _curve(rows, measure, point, labels, seed):
            points[family], kept[family] = curve, _kept(rows, labels)
    if not points:
        return None
    left = there["sequence_id"].nunique() - same["sequence_id"].nunique()
    shown = ", ".join(f"{name} {percent(frac)}" for name, frac in kept.items())
    return Buckets(
        name=NAME,
        measure=measure,
        axis="steps after the eviction point",
        labels=labels,
        points=points,
        kept=kept,
        note=(
            f"Each policy asked for the amount whose kept fraction is nearest a half; kept by these "
            f"sequences over these steps at level {measure.level}: {shown}. All points of a line are "
            f"means over the same sequences; {count(left)} that end earlier are left out."
        ),
    )


def _labels(rows: pd.DataFrame) -> list[str]:
    """Return the buckets up to the last that enough sequences reach, nearest first."""
    reach = rows.groupby("steps")["sequence_id"].nunique()
    order = sorted(reach.index, key=lambda one: int(re.findall(r"\d+", one)[0]))
    far = [number for number, one in enumerate(order) if reach[one] >= MIN_SEQUENCES]
    return [str(one) for one in order[: far[-1] + 1 if far else None]]


def _kept(rows: pd.DataFrame, labels: list[str]) -> float:
    """Return the kept fraction of one policy over the steps shown, mean over the sequences shown.

    Of each sequence its buckets count by their steps, as they do in the kept fraction of all steps.
    """
    in_all = rows.groupby("sequence_id")["steps"].transform("nunique") == len(labels)
    rows = rows[in_all].astype({"kept_frac": np.float64, "num_scored": np.float64})
    sums = rows.assign(kept=rows["kept_frac"] * rows["num_scored"]).groupby("sequence_id")
    return float((sums["kept"].sum() / sums["num_scored"].sum()).mean())


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
            replace(
                shown,
                level=measure.level,
                x=number,
                mean=exact,
                low=float(low),
                high=float(high),
                n=mean.n,
            )
        )
    return made
