"""How many keys a row of each layer attends to in effect, against how many it sees."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from tracekit.report.figures.canvas import REFERENCE, draw, label_ends, line, log_ticks, styles
from tracekit.report.figures.distance_mass import layer_rows, measured_point, windows_note
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import number, sample_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracekit.report.load import Point, Results

NAME = "effective-keys-by-layer"

_PARTICIPATION, _PERPLEXITY, _SEEN = "1 / sum a\u00b2", "exp(entropy)", "keys seen"


def effective_keys_by_layer(results: Results) -> Drawing:
    """Return both numbers of effective keys by layer, and the keys seen.

    Parameters
    ----------
    results
        With attention rows.
    """
    rows, seed = layer_rows(results), results.run["seed"]
    measures = {
        _PARTICIPATION: rows["effective_keys"],
        _PERPLEXITY: np.exp(rows["entropy_nats"]),
        _SEEN: rows["seen_keys"],
    }
    curves = {
        name: [
            measured_point(name, float(layer), part.to_numpy(), seed)
            for layer, part in values.groupby(rows["layer"])
        ]
        for name, values in measures.items()
    }
    least, most = (pick(curves[_PARTICIPATION], key=lambda p: p.mean) for pick in (min, max))
    (seen,) = (point for point in curves[_SEEN] if point.x == most.x)
    return Drawing(
        name=NAME,
        svg=_svg(curves),
        caption=(
            "Level local: keys that a row attends to in effect, two ways of counting. 1 / sum a\u00b2 "
            "(participation number) is a mean over scored rows and query heads and follows the "
            "largest weights; exp(entropy), of the mean entropy, follows the tail as well. Mean over "
            f"sequences ({sample_sizes([p.n for p in curves[_PARTICIPATION]])}), bands: 95\u00a0% "
            f"bootstrap intervals over sequences (seed {seed}; none below 3). Dashed: keys that a "
            f"row sees. The y axis is logarithmic.{windows_note(results)}"
        ),
        alt=(
            f"Effective keys by layer: fewest in layer {least.x:.0f} ({number(least.mean)}), most in "
            f"layer {most.x:.0f} ({number(most.mean)} of {number(seen.mean)} keys seen there)."
        ),
        table=_numbers(curves),
    )


def _numbers(curves: dict[str, list[Point]]) -> pd.DataFrame:
    table = pd.DataFrame([asdict(point) for curve in curves.values() for point in curve])
    table = table.rename(columns={"x": "layer", "mean": "keys", "name": "measure"})
    table["layer"] = table["layer"].astype(int)
    return table[["measure", "level", "layer", "keys", "low", "high", "n"]]


def _svg(curves: dict[str, list[Point]]) -> str:
    looks = styles(curves) | {_SEEN: REFERENCE}

    def paint(axes: Axes) -> None:
        axes.set(xlabel="layer, 0 at the input", ylabel="keys (log scale)", yscale="log")
        ends = {name: line(axes, curve, looks[name]) for name, curve in curves.items()}
        means = [point.mean for curve in curves.values() for point in curve]
        axes.set_ylim(min(means) / 1.5, max(means) * 1.5)
        log_ticks(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        label_ends(axes, ends, looks)

    return draw(NAME, paint)
