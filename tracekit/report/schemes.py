"""Estimators with their controllers: the best one at a size, and its rows in other tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Point, Results

_DECODED = ("asked", "others")
"""Sizes that a decoder can have: asked for, or fitted on other prompts."""


def best_scheme(results: Results, size: int) -> Point | None:
    """Return the estimator with most hits that reads less than the full head; None if none does.

    Parameters
    ----------
    results
        What is judged; bounds are left out.
    size
        Candidates; of each estimator the nearest size that was measured.
    """
    costs = results.means("vocab", "cost_frac")
    curves = results.methods("vocab", "hit_argmax").values()
    points = (min(curve, key=lambda point: abs(point.x - size)) for curve in curves)
    able = (point for point in points if costs.get(point.cell, math.inf) < 1)
    return max(able, key=lambda point: (point.mean, point.family), default=None)


def of_scheme(rows: pd.DataFrame, point: Point) -> pd.DataFrame:
    """Return the rows of an estimator at its size.

    Parameters
    ----------
    rows
        With the columns ``estimator``, ``controller``, ``fit`` and ``size``.
    point
        The estimator, controller and size.
    """
    some = rows[(rows["size"] == point.x) & rows["fit"].isin(_DECODED)]
    control = some["controller"].str.removeprefix("fixed").str.removeprefix("@")
    name = some["estimator"] + ("@" + control).where(control != "", "")
    return some[name == point.name]
