"""Estimators with their controllers: their short names, the best one at a size, and its rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tracekit.schema import DECODED_FITS
from tracekit.simulate.scheme_name import scheme_name

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Point, Results

COMPARED_SIZE = 1024
"""Candidates at which estimators are compared."""

ORACLE, RANDOM = "oracle", "random"
REFERENCES = (ORACLE, RANDOM)
"""The bound that knows the logits, and what knows nothing: shown beside the methods."""


def best_scheme(results: Results) -> Point | None:
    """Return the estimator with most hits that reads less than the full head; None if none does.

    Of each estimator the size nearest ``COMPARED_SIZE`` is judged; bounds are left out.
    """
    costs = results.means("vocab", "cost_frac")
    curves = results.methods("vocab", "hit_argmax").values()
    points = (min(curve, key=lambda point: abs(point.x - COMPARED_SIZE)) for curve in curves)
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
    named = _with_name(rows[rows["size"] == point.x])
    return named[named["name"] == point.name]


def with_family(results: Results, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of what a decoder can size, with the short name of their scheme: ``family``.

    Parameters
    ----------
    results
        Whose summary has the short names.
    rows
        With the columns ``estimator``, ``controller`` and ``fit``.
    """
    named = _with_name(rows)
    told = named.assign(family=named["name"].map(short_names(results)))
    return told[told["family"].notna()]


def _with_name(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of what a decoder can size, with the canonical text of their scheme: ``name``."""
    able = rows[rows["fit"].isin(DECODED_FITS)]
    parts = able["estimator"], able["controller"]
    names: dict[Any, str] = {pair: scheme_name(*pair) for pair in set(zip(*parts, strict=True))}
    return able.assign(name=[names[pair] for pair in zip(*parts, strict=True)])


def short_names(results: Results) -> dict[str, str]:
    """Return the short name of each scheme by its canonical text."""
    rows = results.summary
    of_vocab = rows[rows["question"] == "vocab"]
    return dict(zip(of_vocab["name"], of_vocab["family"], strict=True))
