"""How much a candidate set of a given size covers, one line an estimator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from tracekit.report.figures.canvas import REFERENCE, draw, label_ends, line, reference, styles
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, percent, sample_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracekit.report.load import Results


@dataclass(frozen=True)
class Covered:
    """What is covered: a column of the vocabulary results and its words."""

    measure: str
    axis: str
    meaning: str


ARGMAX = Covered(
    "hit_argmax",
    "steps with the top token covered",
    "Share of steps whose most likely token is a candidate",
)
MASS = Covered("mass", "probability covered", "Probability of the candidates under the full head")


def coverage(results: Results, covered: Covered) -> Drawing:
    """Return one measure of coverage against the candidate size, on a logarithmic x axis."""
    curves = results.curves("vocab", covered.measure)
    points = [point for curve in curves.values() for point in curve]
    looks = styles(curves)
    name = f"coverage-{covered.measure.replace('_', '-')}"

    def paint(axes: Axes) -> None:
        axes.set(xlabel="candidates asked for (log scale)", ylabel=covered.axis)
        axes.set_xscale("log", base=2)
        ends = {family: line(axes, curve, looks[family]) for family, curve in curves.items()}
        axes.set_xticks(sorted({point.x for point in points}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None, symbol="\u00a0%"))
        ends["nothing lost"] = reference(axes, 1)
        label_ends(axes, ends, looks | {"nothing lost": REFERENCE})

    least = min(points, key=lambda point: point.mean)
    most = max(points, key=lambda point: point.mean)
    return Drawing(
        name=name,
        svg=draw(name, paint),
        caption=(
            "Means over sequences, against the size asked for. Bands: 95 % "
            f"bootstrap intervals over sequences ({sample_sizes([p.n for p in points])}; none "
            "below 3). An oracle knows the logits: it is the bound, not a method."
        ),
        alt=(
            f"{covered.meaning}, a line an estimator: from {percent(least.mean)} "
            f"({least.family}, {count(least.x)} candidates) to {percent(most.mean)} "
            f"({most.family}, {count(most.x)} candidates)."
        ),
        table=pd.DataFrame([asdict(point) for point in points])
        .drop(columns=["target", "num_excluded"])
        .rename(columns={"x": "size", "mean": covered.measure}),
    )
