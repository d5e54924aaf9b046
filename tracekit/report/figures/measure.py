"""What the lines of a figure measure: level, column, unit, and how its axis is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter

from tracekit.report.figures.canvas import MOST_NAMED, Style, log_ticks
from tracekit.report.formats import number, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    from tracekit.report.load import Point

HALF = 0.5
"""Kept fraction near which policies are ranked and pictured where one must be chosen."""

_LOG_SPAN = 30.0  # Values that differ by more are drawn on a logarithmic axis.
_BOUND_DASH = (0, (2.2, 1.6))


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of policies at one level of truth.

    Parameters
    ----------
    level
        Level of truth; a figure has one.
    column
        Column of the results.
    label
        Of the axis, with its unit.
    meaning
        What it is, for captions.
    write
        How a value is written.
    full
        Its value under the full cache.
    sign
        1 where less is better, -1 where more is.
    """

    level: str
    column: str
    label: str
    meaning: str
    write: Callable[[float], str]
    full: float = 0.0
    sign: int = 1

    def best(self, points: Iterable[Point]) -> Point:
        """Return the point that loses least, the smaller x among equals."""
        return min(points, key=lambda point: (self.sign * point.mean, point.x, point.name))

    def worst(self, points: Iterable[Point]) -> Point:
        """Return the point that loses most."""
        return max(points, key=lambda point: (self.sign * point.mean, point.x, point.name))

    def spans_decades(self, points: Iterable[Point]) -> bool:
        """Tell whether the axis is logarithmic: nothing lost is 0, and values differ widely."""
        means = [point.mean for point in points if point.mean != 0]
        return self.full == 0 and min(means, default=-1) > 0 and max(means) > _LOG_SPAN * min(means)

    def scale(self, axes: Axes, points: Sequence[Point], floor: float = 0.0) -> None:
        """Set limits, scale and ticks of the y axis for points, with their intervals.

        Parameters
        ----------
        axes
            Where.
        points
            All that is drawn.
        floor
            Noise: a logarithmic axis does not end above it if it is less than a decade away.
        """
        axes.set_ylabel(self.label)
        means = [point.mean for point in points]
        lows, highs = (
            [p.mean if math.isnan(getattr(p, end)) else getattr(p, end) for p in points]
            for end in ("low", "high")
        )
        if self.spans_decades(points):
            # Lower ends of intervals near 0 would take all the room.
            least = min(mean for mean in means if mean > 0) / 1.6
            least = floor / 1.3 if least / 10 < floor < least else least
            axes.set(yscale="log", ylim=(least, max(highs) * 1.4))
            log_ticks(axes.yaxis)
        else:
            low, high = min(*lows, self.full), max(*highs, self.full)
            room = 0.04 * (high - low or 1.0)
            axes.set_ylim(low - room, high + room)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: self.write(value)))


ERROR = Measure(
    level="local",
    column="output_error",
    label="relative error of the attention output",
    meaning="relative L2 error of the attention output over the scored rows, all layers",
    write=percent,
)
PREDICTED_KL = Measure(
    level="predicted",
    column="kl_predicted_nats",
    label="KL in nats a token, level predicted",
    meaning="KL of the next-token distributions, foretold from influence probes; an estimate",
    write=number,
)
KL = Measure(
    level="propagated",
    column="kl_nats",
    label="KL in nats a token, level propagated",
    meaning="KL of the next-token distributions under the full and the reduced cache",
    write=number,
)
SAME_TOP = Measure(
    level="propagated",
    column="same_top_frac",
    label="steps with the same most likely token",
    meaning="scored steps whose most likely token stays the same",
    write=percent,
    full=1.0,
    sign=-1,
)
PERPLEXITY = Measure(
    level="propagated",
    column="perplexity_change_frac",
    label="change of perplexity",
    meaning=(
        "perplexity over that of the full cache, less 1: exp of the mean change of surprisal; only "
        "texts that were given, for a model is blind to faults of its own text"
    ),
    write=percent,
)
KEY = {one.level: one for one in (ERROR, PREDICTED_KL, KL)}
"""By level, the measure that policies are compared by."""


def nearest(curve: Iterable[Point], frac: float = HALF) -> Point:
    """Return the point of a curve whose x is nearest ``frac``, the smaller x of two."""
    return min(curve, key=lambda point: (abs(point.x - frac), point.x, point.name))


def chosen_names(curves: Mapping[str, Sequence[Point]], measure: Measure) -> list[str]:
    """Return the policies that have a name in a figure: bounds, then those best at about a half."""
    order = sorted(
        curves,
        key=lambda name: (curves[name][0].causal, measure.sign * nearest(curves[name]).mean, name),
    )
    return order[:MOST_NAMED]


def titled(curves: Mapping[str, Sequence[Point]]) -> dict[str, str]:
    """Return the name of each policy in a figure: bounds, which no decoder has, are called so."""
    return {name: name if curve[0].causal else f"{name} (bound)" for name, curve in curves.items()}


def bounded(looks: Mapping[str, Style], curves: Mapping[str, Sequence[Point]]) -> dict[str, Style]:
    """Return the styles by title, those of bounds with a dash of their own."""
    return {
        title: looks[name] if curves[name][0].causal else replace(looks[name], dash=_BOUND_DASH)
        for name, title in titled(curves).items()
    }
