"""Error of the attention output against the kept fraction, one line a policy."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.ticker import PercentFormatter

from tracekit.report.figures.canvas import REFERENCE, draw, label_ends, line, reference, styles
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import percent, sample_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracekit.report.load import Point, Results

_NAME = "error-by-kept-fraction"


def error_curve(results: Results, bound: float) -> Drawing:
    """Return the curves with their bootstrap bands.

    Parameters
    ----------
    results
        With KV points.
    bound
        Error that the answer asks for, drawn as a line.
    """
    curves = results.curves("kv", "output_error")
    points = [point for curve in curves.values() for point in curve]
    least = min(points, key=lambda point: point.mean)
    most = max(points, key=lambda point: point.mean)
    return Drawing(
        name=_NAME,
        svg=_svg(curves, bound),
        caption=(
            f"Level {'local'}: relative L2 error of the attention output over the scored "
            "rows, mean over sequences, against the kept fraction that was measured. Bands: 95 % "
            f"bootstrap intervals over sequences ({sample_sizes([p.n for p in points])}; none "
            "below 3). Lower and further left is better."
        ),
        alt=(
            "Output error against kept fraction, a line a policy: lowest "
            f"{percent(least.mean)} ({least.family} at {percent(least.x)} kept), highest "
            f"{percent(most.mean)} ({most.family} at {percent(most.x)} kept)."
        ),
        table=pd.DataFrame([asdict(point) for point in points]).rename(
            columns={"x": "kept_frac", "mean": "output_error"}
        ),
    )


def _svg(curves: dict[str, list[Point]], bound: float) -> str:
    looks = styles(curves)

    def paint(axes: Axes) -> None:
        axes.set(xlabel="kept fraction of the cache (removed: the rest)", xlim=(0, 1))
        axes.set(ylabel="relative error of the attention output")
        ends = {family: line(axes, curve, looks[family]) for family, curve in curves.items()}
        low, high = "nothing lost", f"{percent(bound)} error"
        ends |= {low: reference(axes, 0), high: reference(axes, bound)}
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
        axes.xaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
        label_ends(axes, ends, looks | {low: REFERENCE, high: REFERENCE})

    return draw(_NAME, paint)
