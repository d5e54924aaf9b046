"""What a candidate set covers against what it reads: the figure that decides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from tracekit.measure.front import pareto_front
from tracekit.report.figures.canvas import INK, REFERENCE, draw, label_ends, lines, ring
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, evidence, percent, sample_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes

    from tracekit.report.figures.canvas import Style
    from tracekit.report.load import Point, Results

FULL_HEAD = "full head"
_TICKS = tuple(digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5))


def priced(results: Results) -> dict[str, list[Point]]:
    """Return the curves of the share of most likely tokens covered, x what is read of the head."""
    costs = results.means("vocab", "cost_frac")
    curves = results.curves("vocab", "hit_argmax")
    moved = {
        name: [replace(one, x=costs[one.cell]) for one in curve if one.cell in costs]
        for name, curve in curves.items()
    }
    return {name: sorted(curve, key=lambda p: p.target) for name, curve in moved.items() if curve}


def members(points: Iterable[Point]) -> list[Point]:
    """Return the front of what a decoder can do for less than the full head, the cheapest first.

    Parameters
    ----------
    points
        x is the cost, over that of the full head; bounds and what costs as much are left out.
    """
    there = sorted((p for p in points if p.causal and p.x < 1), key=lambda p: (p.x, p.name))
    is_front = pareto_front([p.x for p in there], [-p.mean for p in there])
    return [point for point, one in zip(there, is_front, strict=True) if one]


def cost_curve(results: Results, looks: dict[str, Style]) -> Drawing | None:
    """Return coverage against the bytes read, on a logarithmic x axis; None without costs.

    Parameters
    ----------
    results
        With candidate sets.
    looks
        Style of each estimator that has a name.
    """
    curves = priced(results)
    if not curves:
        return None
    points = [point for curve in curves.values() for point in curve]
    best = members(points)

    def paint(axes: Axes) -> None:
        axes.set(xscale="log", ylabel="steps with the top token covered")
        ends = lines(axes, curves, looks, looks.keys())
        _axes(axes, [point.x for point in points])
        axes.step(*_xy(best), where="post", color=INK, alpha=0.4, linewidth=0.9)
        ring(axes, best)
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
        label_ends(axes, ends, looks)

    return Drawing(
        name="coverage-cost",
        svg=draw("coverage-cost", paint),
        caption=(
            "Bytes read a step, of the estimator and of its candidates' rows, over those of the full "
            "head, one request at a time; a point a size. Right of 100\u00a0% nothing is saved. "
            f"Rings: the {len(best)} points that no method beats in both. Level local, means over "
            f"sequences ({sample_sizes([point.n for point in points])}), bands 95\u00a0% bootstrap "
            f"intervals (seed {results.run['seed']}; none below 3)."
        ),
        alt=_alt(best),
        table=_table(points, best),
    )


def _table(points: Sequence[Point], best: Sequence[Point]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            (one.family, int(one.target), one.x, one.mean, one.low, one.high, one.n, one in best)
            for one in points
        ],
        columns=["family", "size", "cost_frac", "hit_argmax", "low", "high", "n", "on_front"],
    )


def _alt(best: Sequence[Point]) -> str:
    if not best:
        return "Coverage against bytes read: no method reads less than the full head."
    top = best[-1]
    return (
        f"Coverage against bytes read: the most that a method covers for less than the full head is "
        f"{percent(top.mean)} of most likely tokens ({evidence(top.low, top.high, top.n)}), "
        f"{top.family} at {count(top.target)} candidates, which reads {percent(top.x)} of it."
    )


def _axes(axes: Axes, costs: Sequence[float]) -> None:
    """Let x be what is read from least to most, the full head within, what is saved along the top."""
    low, high = min(costs) / 1.3, max(1.6, 1.2 * max(costs))
    axes.axvline(1, color=REFERENCE.color, linestyle=REFERENCE.dash, linewidth=1)
    axes.axvspan(1, high, color=INK, alpha=0.06, linewidth=0)
    axes.text(0.97, 0.02, FULL_HEAD, transform=axes.get_xaxis_transform(), ha="right", va="bottom")
    axes.set(xlim=(low, high), xlabel="bytes read a step over the full head's (log scale)")
    top = axes.secondary_xaxis("top", functions=(_same, _same))
    top.set_xlabel("bytes saved")
    ticks = [one for one in _TICKS if low <= one <= high]
    for axis, there, text in (
        (axes.xaxis, ticks, _read),
        # What is saved changes little where little is read: its ticks would touch.
        (top.xaxis, [one for one in ticks if 0.1 <= one <= 1 or one == 0.01], _saved),
    ):
        axis.set_major_locator(FixedLocator(there))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(text))


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.x for point in points], [point.mean for point in points]


def _same(x: Any) -> Any:
    return x


def _read(x: float, _: int) -> str:
    return f"{100 * x:.3g}\u00a0%"


def _saved(x: float, _: int) -> str:
    return f"{100 * (1 - x):.3g}\u00a0%"
