"""How much a candidate set of a given size covers, one line an estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from tracekit.report.figures.canvas import draw, label_ends, lines
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, evidence, percent, sample_sizes
from tracekit.report.verdict.schemes import RANDOM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from tracekit.report.figures.canvas import Style
    from tracekit.report.load import Point, Results


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


def coverage(results: Results, covered: Covered, looks: dict[str, Style], size: int) -> Drawing:
    """Return one measure of coverage against the candidate size, on a logarithmic x axis.

    Parameters
    ----------
    results
        With candidate sets.
    covered
        The measure.
    looks
        Style of each estimator that has a name, by name; the others are grey.
    size
        The size at which the best one is told in words.
    """
    curves = results.curves("vocab", covered.measure)
    points = [point for curve in curves.values() for point in curve]
    num_tokens = results.spec.num_tokens
    name = f"coverage-{covered.measure.replace('_', '-')}"

    def paint(axes: Axes) -> None:
        axes.set(xlabel="candidates asked for (log scale)", ylabel=covered.axis)
        axes.set_xscale("log", base=2)
        ends = lines(axes, curves, looks, looks.keys())
        _sizes(axes, sorted({point.x for point in points}), num_tokens)
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
        label_ends(axes, ends, looks)

    table = pd.DataFrame(
        [(one.family, int(one.x), one.mean, one.low, one.high, one.n) for one in points],
        columns=["family", "size", covered.measure, "low", "high", "n"],
    )
    return Drawing(
        name=name,
        svg=draw(name, paint),
        caption=_caption(covered, points, num_tokens, results.run["seed"]),
        alt=_alt(covered, points, looks, size, num_tokens),
        table=table,
    )


def _caption(covered: Covered, points: Sequence[Point], num_tokens: int, seed: int) -> str:
    return (
        f"{covered.meaning}, against the size asked for; along the top the same as a share of "
        f"the {count(num_tokens)} tokens of the vocabulary. Level local, means over sequences "
        f"({sample_sizes([point.n for point in points])}), bands 95\u00a0% bootstrap intervals "
        f"(seed {seed}; none below 3). A line goes flat where an estimator has "
        "no more candidates to give. The oracle is the bound, not a method."
    )


def _sizes(axes: Axes, sizes: Sequence[float], num_tokens: int) -> None:
    """Mark the sizes below, and above what share of the vocabulary each of them is."""

    def share(size: Any) -> Any:
        return size / num_tokens

    def size_of(share: Any) -> Any:
        return share * num_tokens

    top = axes.secondary_xaxis("top", functions=(share, size_of))
    top.set_xlabel("of the vocabulary")
    for axis, ticks, text in (
        (axes.xaxis, sizes, count),
        (top.xaxis, [size / num_tokens for size in sizes], percent),
    ):
        axis.set_ticks(ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, _, text=text: text(x)))


def _alt(
    covered: Covered, points: Sequence[Point], looks: dict[str, Style], size: int, num_tokens: int
) -> str:
    """Return the key number: what the best named method covers at one size, and what chance does."""
    there = {one.family: one for one in points if one.x == size and one.family in looks}
    methods = [one for one in there.values() if one.causal and one.family != RANDOM]
    told = [
        f"{percent(one.mean)} by {one.family} ({evidence(one.low, one.high, one.n)})"
        for one in (max(methods, key=lambda one: one.mean, default=None), there.get(RANDOM))
        if one is not None
    ]
    where = f"at {count(size)} candidates, {percent(size / num_tokens)} of the vocabulary"
    return f"{covered.meaning} {where}: {', '.join(told) or 'no method was tried there'}."
