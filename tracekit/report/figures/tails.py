"""How often a candidate set loses more than so much: the tail of -ln m, one line an estimator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from tracekit.measure.stats import bootstrap_mean
from tracekit.report.figures.canvas import draw, label_ends, lines
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, evidence, percent, sample_sizes
from tracekit.report.load import Point
from tracekit.report.verdict.schemes import REFERENCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray
    from pandas.api.typing import DataFrameGroupBy

    from tracekit.report.figures.canvas import Style
    from tracekit.report.load import Results

AT_NATS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0)
"""Losses above which steps are counted."""

HALF_NATS = 0.3
"""The one told in words: about a quarter of the probability is lost."""


def exceedance(rows: pd.DataFrame, *, seed: int) -> list[tuple[float, float, float, float, int]]:
    """Return by loss the share of steps that lose more, with its interval and n.

    Parameters
    ----------
    rows
        Steps of one estimator and size: ``sequence_id`` and ``neg_log_mass_nats``, infinite where
        no candidate has any probability.
    seed
        Of the resampling of whole sequences.

    Returns
    -------
    list of tuple
        (loss in nats, share of all steps alike, low, high, sequences), NaN ends below 3 sequences.
    """
    code_S, names = pd.factorize(rows["sequence_id"])
    loss_S: NDArray[np.float64] = rows["neg_log_mass_nats"].to_numpy(np.float64)
    steps_N = np.bincount(code_S, minlength=len(names))
    found = []
    for nats in AT_NATS:
        share_N = np.bincount(code_S, weights=loss_S > nats, minlength=len(names)) / steps_N
        told = bootstrap_mean(share_N, seed=seed, weights=steps_N)
        low, high = (np.nan if one is None else one for one in (told.low, told.high))
        found.append((nats, float(told.mean or 0.0), low, high, told.n))
    return found


def tails(
    results: Results, candidates: pd.DataFrame, looks: dict[str, Style], size: int
) -> Drawing | None:
    """Return the share of steps whose -ln m is above x, on two logarithmic axes; None of nothing.

    Parameters
    ----------
    results
        With candidate sets.
    candidates
        Rows of ``schema.CANDIDATES`` at one size, with a column ``family``.
    looks
        Style of each estimator that has a name; those alone are drawn.
    size
        That size.
    """
    by_family = candidates[candidates["family"].isin(list(looks))].groupby("family")
    curves = _curves(by_family, results.run["seed"])
    if not curves:
        return None
    num_steps = int(by_family.size().max())
    drawn = {name: [one for one in curve if one.mean > 0] for name, curve in curves.items()}
    drawn = {name: curve for name, curve in drawn.items() if curve}

    points = [point for curve in curves.values() for point in curve]
    return Drawing(
        name="mass-tails",
        svg=draw("mass-tails", lambda axes: _paint(axes, drawn, looks, num_steps)),
        caption=(
            f"At {count(size)} candidates: m is their probability, -ln m what the step loses. A line "
            "that ends early has no step that loses more. All steps alike "
            f"(up to {count(num_steps)}), level local, "
            f"{sample_sizes([one.n for one in points])} sequences; bands 95\u00a0% bootstrap "
            f"intervals over sequences (seed {results.run['seed']}; none below 3)."
        ),
        alt=_alt(curves, size),
        table=_table(points),
    )


def _curves(by_family: DataFrameGroupBy[Any, Any], seed: int) -> dict[str, list[Point]]:
    return {
        str(family): [
            Point(str(family), str(family), "local", True, "nats", np.nan, *told, 0)
            for told in exceedance(rows, seed=seed)
        ]
        for family, rows in by_family
    }


def _paint(
    axes: Axes, drawn: dict[str, list[Point]], looks: dict[str, Style], num_steps: int
) -> None:
    axes.set(xscale="log", yscale="log", ylabel="steps that lose more (log scale)")
    axes.set_xlabel("-ln m: KL of the pruned step from the full one, nats (log scale)")
    axes.set(xlim=(AT_NATS[0] / 1.1, AT_NATS[-1] * 1.1), ylim=(0.5 / num_steps, 1.3))
    ends = lines(axes, drawn, looks, looks.keys())
    axes.set_xticks(AT_NATS)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}\u00a0%"))
    label_ends(axes, ends, looks)


def _table(points: list[Point]) -> pd.DataFrame:
    return pd.DataFrame(
        [(one.family, one.x, one.mean, one.low, one.high, one.n) for one in points],
        columns=["family", "above_nats", "share_of_steps", "low", "high", "n"],
    )


def _alt(curves: dict[str, list[Point]], size: int) -> str:
    methods = {name: curve for name, curve in curves.items() if name not in REFERENCES}
    at_half = [one for curve in (methods or curves).values() for one in curve if one.x == HALF_NATS]
    best = min(at_half, key=lambda one: one.mean)
    return (
        f"Tails of -ln m at {count(size)} candidates: {best.family} loses more than "
        f"{HALF_NATS:g} nats at {percent(best.mean)} of steps "
        f"({evidence(best.low, best.high, best.n)}), the fewest of the named."
    )
