"""How far a prediction can be trusted: propagated KL against predicted KL, a mark a cell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tracekit import schema
from tracekit.report.figures.canvas import INK, REFERENCE, Style, draw, label_ends, log_ticks
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, number
from tracekit.simulate.calibration import PowerLaw
from tracekit.simulate.calibration_cells import calibration_cells, counted_cells

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from matplotlib.axes import Axes

    from tracekit.report.load import Results

NAME = "propagated-against-predicted"

MOST_NAMED = 6
"""Families with a colour and a name of their own: those farthest from the diagonal."""

_EQUAL, _LAW = "equal", "power law"
_LAW_STYLE = Style(INK, "-", "")


def calibration_scatter(results: Results, looks: Mapping[str, Style]) -> Drawing | None:
    """Return the marks, the diagonal and the power law; None without cells at all three levels.

    Parameters
    ----------
    results
        Its cells are matched anew, its statistics are those of the calibration table.
    looks
        Style of each policy, the same in all figures.
    """
    of_all = calibration_cells(results.whole)
    counted = counted_cells(of_all)
    cells = counted[counted["has_log"]]
    if cells.empty:
        return None
    law, named = _law(results), _named(cells)
    sizes = f"n\u00a0=\u00a0{count(len(cells))} cells of {cells['sequence_id'].nunique()} sequences"
    spearman = number(calibrated(results, "spearman")["value"])
    times = number(calibrated(results, "propagated_over_predicted")["value"])
    others = cells["family"].nunique() - len(named)
    return Drawing(
        name=NAME,
        svg=_svg(cells, law, {one: looks[one] for one in named}),
        caption=(
            "Level propagated, exact and from the model, against level predicted, an estimate from "
            "influence probes; both axes logarithmic. A mark is a policy on a sequence (left out: "
            f"{_left_out(of_all)}). Above the dashed diagonal predictions run low. "
            + (
                f"Solid: the power law fitted on these marks, propagated = {number(np.exp(law.a))} x "
                f"predicted^{number(law.b)}; what it corrects stays an estimate. "
                if law is not None
                else ""
            )
            + (f"Small marks: families nearer the diagonal ({others})." if others else "")
        ).strip(),
        alt=(
            f"Propagated against predicted KL, a mark a cell, {sizes}: Spearman {spearman}; in the "
            f"median propagated is {times} times predicted."
        ),
        table=cells[
            ["sequence_id", "family", "policy", "kl_predicted_nats", "kl_nats", "noise_kl_nats"]
        ],
    )


def calibrated(results: Results, statistic: str, group: str = "all") -> dict[str, float]:
    """Return a statistic of the predicted KL with its ends and cells; NaN where there is none."""
    rows = results.table(schema.CALIBRATION)
    of = (rows["statistic"] == statistic) & (rows["group"] == group)
    found = rows[of & (rows["level"] == "predicted")]
    names = ("value", "low", "high", "num_cells")
    return {one: float(found[one].iloc[0]) if len(found) else float("nan") for one in names}


def _law(results: Results) -> PowerLaw | None:
    a, b = (calibrated(results, f"power_law_{one}")["value"] for one in "ab")
    return PowerLaw(a, b) if b > 0 else None


def _left_out(cells: pd.DataFrame) -> str:
    """Return how many cells are no marks, and why."""
    counted = counted_cells(cells)
    return (
        f"{int(cells['is_bound'].sum())} of bounds, "
        f"{int((cells['is_idle'] & ~cells['is_bound']).sum())} that change nothing, "
        f"{int((~counted['has_log']).sum())} at the noise floor or foretold as 0"
    )


def _named(cells: pd.DataFrame) -> list[str]:
    """Return the families that have a name in the picture, sorted."""
    off = np.abs(np.log((cells["kl_nats"] / cells["kl_predicted_nats"]).to_numpy()))
    medians = cells.assign(off=off).groupby("family")["off"].median()
    farthest = medians.sort_values(ascending=False, kind="stable").index[:MOST_NAMED]
    return sorted(str(family) for family in farthest)


def _svg(cells: pd.DataFrame, law: PowerLaw | None, named: Mapping[str, Style]) -> str:
    looks = {one: replace(style, dash="") for one, style in named.items()}

    def paint(axes: Axes) -> None:
        axes.set(xlabel="KL in nats a token, level predicted", xscale="log")
        axes.set(ylabel="KL in nats a token, level propagated", yscale="log")
        _fit_axes(axes, cells)
        both = np.array(axes.get_xlim())
        ends = {_EQUAL: _line(axes, both, both, REFERENCE)}
        if law is not None:
            told = cells["kl_predicted_nats"].agg(["min", "max"]).to_numpy()
            ends[_LAW] = _line(axes, told, law.corrected(told), _LAW_STYLE)
        rest = cells[~cells["family"].isin(named)]
        _marks(axes, rest, Style(INK, "", "."), alpha=0.45)
        for family, style in looks.items():
            part = cells[cells["family"] == family]
            _marks(axes, part, style, alpha=1.0)
            x, y = part[["kl_predicted_nats", "kl_nats"]].to_numpy().T
            ends[family] = float(x.max()), float(y[x.argmax()])
        label_ends(axes, ends, looks | {_EQUAL: REFERENCE, _LAW: _LAW_STYLE})

    return draw(NAME, paint)


def _fit_axes(axes: Axes, cells: pd.DataFrame) -> None:
    """Give both axes the same limits and plain ticks."""
    both = cells[["kl_predicted_nats", "kl_nats"]].to_numpy()
    least, most = float(both.min()) / 1.6, float(both.max()) * 1.6
    axes.set(xlim=(least, most), ylim=(least, most))
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, style: Style) -> tuple[float, float]:
    """Draw a straight line; return its last point."""
    axes.plot(x, y, color=style.color, linestyle=style.dash, linewidth=1.2)
    return float(x[-1]), float(y[-1])


def _marks(axes: Axes, cells: pd.DataFrame, style: Style, *, alpha: float) -> None:
    x, y = cells["kl_predicted_nats"], cells["kl_nats"]
    axes.plot(x, y, color=style.color, linestyle="", marker=style.marker, alpha=alpha)
