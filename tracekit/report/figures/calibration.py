"""How far a prediction can be trusted: propagated KL against predicted KL, a mark a cell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tracekit.report.figures.canvas import INK, REFERENCE, Style, draw, label_ends, styles
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, number
from tracekit.simulate.calibration import PowerLaw
from tracekit.simulate.calibration_cells import counted_cells

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from tracekit.report.load import Results

NAME = "propagated-against-predicted"

MOST_NAMED = 6
"""Families with a colour and a name of their own: those farthest from the diagonal."""

_EQUAL, _LAW = "equal", "power law"
_LAW_STYLE = Style(INK, "-", "")
_DECADES = 3  # Wider axes have a tick a decade, others one between as well.


def calibration_scatter(results: Results) -> Drawing | None:
    """Return the marks, the diagonal and the power law; None without cells at all three levels."""
    counted = counted_cells(results.cells)
    cells = counted[counted["has_log"]]
    if cells.empty:
        return None
    law, named = _law(results), _named(cells)
    sizes = f"n\u00a0=\u00a0{count(len(cells))} cells of {cells['sequence_id'].nunique()} sequences"
    spearman = number(_value(results, "spearman", "all"))
    times = number(_value(results, "propagated_over_predicted", "all"))
    others = cells["family"].nunique() - len(named)
    return Drawing(
        name=NAME,
        svg=_svg(cells, law, named),
        caption=(
            "Level propagated, exact and from the model, against level predicted, an estimate from "
            "influence probes; both axes logarithmic. A mark is a policy on a sequence (left out: "
            f"{_left_out(results)}). Above the dashed diagonal predictions run low. "
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


def _value(results: Results, statistic: str, group: str) -> float:
    """Return a statistic of the predictions; NaN where there is none."""
    rows = results.calibration
    of = (rows["statistic"] == statistic) & (rows["group"] == group)
    found = rows.loc[of & (rows["level"] == "predicted"), "value"]
    return float(found.iloc[0]) if len(found) else float("nan")


def _law(results: Results) -> PowerLaw | None:
    law = PowerLaw(_value(results, "power_law_a", "all"), _value(results, "power_law_b", "all"))
    return law if law.b > 0 else None


def _left_out(results: Results) -> str:
    """Return how many cells are no marks, and why."""
    cells = results.cells
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


def _svg(cells: pd.DataFrame, law: PowerLaw | None, named: list[str]) -> str:
    looks = {one: replace(style, dash="") for one, style in styles(named).items()}

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
    between = (1.0, 3.0) if np.log10(most / least) < _DECADES else (1.0,)
    axes.set(xlim=(least, most), ylim=(least, most))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=between))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, style: Style) -> tuple[float, float]:
    """Draw a straight line; return its last point."""
    axes.plot(x, y, color=style.color, linestyle=style.dash, linewidth=1.2)
    return float(x[-1]), float(y[-1])


def _marks(axes: Axes, cells: pd.DataFrame, style: Style, *, alpha: float) -> None:
    x, y = cells["kl_predicted_nats"], cells["kl_nats"]
    axes.plot(x, y, color=style.color, linestyle="", marker=style.marker, alpha=alpha)
