"""Which policies are worth having: cache against KL, and the front that no other one beats."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tracekit.measure.front import pareto_front
from tracekit.report.figures.canvas import INK, MOST_NAMED, Style, draw, kept_axis, label_ends
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import percent, sample_sizes, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from tracekit.report.figures.measure import Measure
    from tracekit.report.load import Point

NAME = "front-of-cache-and-kl"


def pareto(
    measure: Measure,
    curves: Mapping[str, Sequence[Point]],
    looks: Mapping[str, Style],
    kv_bytes: Mapping[tuple[str, str], float],
    full_bytes: float,
) -> Drawing:
    """Return kept fraction and KL of all policies that a decoder can have, and their front.

    Parameters
    ----------
    measure
        The KL.
    curves
        At least one, of causal policies that free memory.
    looks
        Style of each policy.
    kv_bytes
        Mean bytes held, by ``Point.cell``.
    full_bytes
        Mean bytes of the full cache; NaN where they are not known.
    """
    points = sorted(
        (point for curve in curves.values() for point in curve), key=lambda p: (p.x, p.mean, p.name)
    )
    is_front = pareto_front([p.x for p in points], [p.mean for p in points])
    best = [point for point, one in zip(points, is_front, strict=True) if one]
    table = pd.DataFrame([asdict(point) for point in points]).drop(columns=["x_name", "causal"])
    table["kv_bytes"] = [kv_bytes.get(point.cell, np.nan) for point in points]
    table["is_front"] = is_front
    members = ", ".join(f"{p.family} at {percent(p.x)} ({measure.write(p.mean)})" for p in best)
    return Drawing(
        name=NAME,
        svg=_svg(measure, points, best, looks, full_bytes),
        caption=(
            f"Level {measure.level}: mean over sequences ({sample_sizes([p.n for p in points])}) of "
            "kept fraction and KL, a mark a policy at one kept fraction; bounds and policies that "
            "free nothing are left out. The step line is the front: no policy tried here keeps less "
            f"and loses less. On it, by kept fraction (KL in nats a token): {members}. Neighbours on "
            "the front whose intervals overlap may change places on other prompts."
        ),
        alt=(
            f"Kept fraction against KL, level {measure.level}: {len(best)} of {len(points)} points "
            f"are on the front, from {_member(best[0])} with {measure.write(best[0].mean)} nats to "
            f"{_member(best[-1])} with {measure.write(best[-1].mean)} nats."
        ),
        table=table.rename(columns={"x": "kept_frac", "mean": measure.column}),
    )


def _member(point: Point) -> str:
    return f"{point.family} at {percent(point.x)}"


def _svg(
    measure: Measure,
    points: Sequence[Point],
    best: Sequence[Point],
    looks: Mapping[str, Style],
    full_bytes: float,
) -> str:
    named = _named(best)
    marks = {_member(point): looks[point.family] for point in named}

    def paint(axes: Axes) -> None:
        kept_axis(axes, "kept fraction of the cache" + _in_bytes(full_bytes))
        measure.scale(axes, points)
        x, y = [p.x for p in best], [p.mean for p in best]
        axes.plot([*x, 1], [*y, y[-1]], drawstyle="steps-post", color=INK, linewidth=1.2, alpha=0.7)
        for point in points:
            look = looks[point.family]
            on = point in best
            axes.plot(
                point.x,
                point.mean,
                linestyle="",
                marker=look.marker,
                color=look.color if on else INK,
                alpha=1.0 if on else 0.35,
                markersize=7 if on else 4.5,
            )
        ends = {_member(point): (point.x, point.mean) for point in named}
        label_ends(
            axes, ends, {name: Style(one.color, "", one.marker) for name, one in marks.items()}
        )

    return draw(NAME, paint)


def _named(best: Sequence[Point]) -> list[Point]:
    """Return members of the front that have a name in the picture, evenly chosen along it."""
    if len(best) <= MOST_NAMED:
        return list(best)
    chosen = np.linspace(0, len(best) - 1, MOST_NAMED).round().astype(int)
    return [best[number] for number in chosen]


def _in_bytes(full_bytes: float) -> str:
    return "" if np.isnan(full_bytes) else f" (100\u00a0% is {size(full_bytes)} on average)"
