"""The one way to draw lines: a style a series, labels at the ends, SVG in the page's own colours."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as MplFigure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from tracekit.errors import InputError
from tracekit.report.figures.page_svg import for_page
from tracekit.report.formats import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from tracekit.report.load import Point

INK = "#010203"
"""Stands for the text colour of the page while drawing; becomes ``currentColor``."""

# Okabe-Ito, those with a contrast of 3 or more on white and on the dark ground of style.css.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", INK)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_BAND_ALPHA = 0.1
_LONGEST_LABEL = 24
_TICK_DECADES = 3  # Wider logarithmic axes have a tick a decade, others one between as well.
MOST_NAMED = 12
"""Lines of a figure that have a colour and a name; beyond, names cannot be told apart."""

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tracekit",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


@dataclass(frozen=True)
class Style:
    """Colour, dashes and marker of a series: three ways to tell it from the others."""

    color: str
    dash: Any
    marker: str


REFERENCE = Style(INK, (0, (4, 3)), "")
"""Look of a line that is no measurement."""


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a style for each name, the same for the same set of names in every figure."""
    return {
        name: Style(
            _COLORS[number % len(_COLORS)],
            _DASHES[number % len(_DASHES)],
            _MARKERS[number % len(_MARKERS)],
        )
        for number, name in enumerate(sorted(set(names)))
    }


def draw(name: str, paint: Callable[[Axes], None]) -> str:
    """Return an ``<svg>`` element for a page.

    Parameters
    ----------
    name
        Name of the figure, unique in the page: its ids are made of it.
    paint
        Draws on the axes; the margin at the right is free for ``label_ends``.

    Raises
    ------
    InputError
        If there is no font to measure texts with.
    """
    _require_font()
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # Text stays text in the SVG: what the measuring font lacks, the reader's browser has.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = MplFigure(figsize=(7.9, 4.4))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.125, 0.14, 0.534, 0.75))
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        paint(axes)
        file = io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return for_page(file.getvalue().decode("utf-8"), name, INK)


def _require_font() -> None:
    """Raise if no font is found; matplotlib brings one along, and falls back on it."""
    try:
        findfont(FontProperties())
    except ValueError as error:
        msg = (
            "no font is found to measure the texts of figures with: install one (Debian: "
            "fonts-dejavu-core), or matplotlib anew, which brings it."
        )
        raise InputError(msg) from error


def line(axes: Axes, curve: Sequence[Point], style: Style) -> tuple[float, float]:
    """Draw the means of one series with the band of its intervals; return its last point."""
    axes.plot(
        [point.x for point in curve],
        [point.mean for point in curve],
        color=style.color,
        linestyle=style.dash,
        marker=style.marker,
    )
    banded = [point for point in curve if not math.isnan(point.low)]
    axes.fill_between(
        [point.x for point in banded],
        [point.low for point in banded],
        [point.high for point in banded],
        color=style.color,
        alpha=_BAND_ALPHA,
        linewidth=0,
    )
    return curve[-1].x, curve[-1].mean


def lines(
    axes: Axes,
    curves: Mapping[str, Sequence[Point]],
    looks: Mapping[str, Style],
    named: Collection[str],
) -> dict[str, tuple[float, float]]:
    """Draw one line a series, those without a name thin and grey; return the ends of the named.

    Parameters
    ----------
    axes
        Where.
    curves
        Points by name.
    looks
        Style of each named series.
    named
        Series that are told apart; at most ``MOST_NAMED``.
    """
    for name in sorted(curves.keys() - set(named)):
        x, y = ([getattr(point, one) for point in curves[name]] for one in ("x", "mean"))
        axes.plot(x, y, color=INK, alpha=0.25, linewidth=0.9)
    return {name: line(axes, curves[name], looks[name]) for name in curves if name in named}


def kept_axis(axes: Axes, label: str = "kept fraction of the cache", rest: str = "removed") -> None:
    """Let x be a kept (or read) fraction from 0 to 1, what is left of it along the top."""
    axes.set(xlabel=label, xlim=(0, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
    top = axes.secondary_xaxis("top", functions=(_rest, _rest))
    top.set_xlabel(rest)
    top.xaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))


def _rest(frac: Any) -> Any:
    return 1 - frac


def log_ticks(axis: Axis) -> None:
    """Write plain numbers at the ticks of a logarithmic axis whose limits are set."""
    least, most = axis.get_view_interval()
    between = (1.0, 3.0) if math.log10(most / least) < _TICK_DECADES else (1.0,)
    axis.set_major_locator(LogLocator(subs=between))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def ring(axes: Axes, points: Iterable[Point]) -> None:
    """Draw a ring around points that are not what they seem; the caption says why."""
    spots = [(point.x, point.mean) for point in points]
    if spots:
        x, y = zip(*spots, strict=True)
        axes.plot(
            x, y, linestyle="", marker="o", markersize=10, fillstyle="none", color=INK, alpha=0.75
        )


def reference(axes: Axes, y: float) -> tuple[float, float]:
    """Draw a dashed horizontal line over the whole width; return its right end."""
    axes.axhline(y, color=REFERENCE.color, linestyle=REFERENCE.dash, linewidth=1)
    return axes.get_xlim()[1], y


def label_ends(axes: Axes, ends: dict[str, tuple[float, float]], looks: dict[str, Style]) -> None:
    """Write each series' name in the right margin, tied to its last point by a thin line.

    Parameters
    ----------
    axes
        With all series drawn: their limits are fixed from here on.
    ends
        Last point of each series, in data coordinates.
    looks
        Style of each series.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    points = {name: to_axes.transform(end) for name, end in ends.items()}
    order = sorted(points, key=lambda name: (points[name][1], name))
    heights = _spread([float(points[name][1]) for name in order])
    for name, height in zip(order, heights, strict=True):
        style, (x, y) = looks[name], points[name]
        axes.plot(
            [x, 1.035],
            [y, height],
            transform=axes.transAxes,
            clip_on=False,
            color=style.color,
            linewidth=0.8,
            alpha=0.6,
        )
        axes.plot(
            [1.035, 1.065, 1.095],
            [height] * 3,
            transform=axes.transAxes,
            clip_on=False,
            color=style.color,
            linestyle=style.dash,
            marker=style.marker,
            markevery=[1],
        )
        axes.text(1.115, height, _short(visible(name)), transform=axes.transAxes, va="center")


def _short(label: str) -> str:
    """Return a label that fits the margin: beginnings and ends tell names apart, middles do not."""
    if len(label) <= _LONGEST_LABEL:
        return label
    half = _LONGEST_LABEL // 2
    return f"{label[: half - 1]}\u2026{label[-half:]}"


def _spread(heights: list[float]) -> list[float]:
    """Return ascending heights moved apart so that labels do not overlap, inside [0, 1]."""
    gap = min(0.075, 1 / max(1, len(heights) - 1))
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else max(height, 0.0))
    ceiling = 1.0
    for number in reversed(range(len(placed))):
        placed[number] = min(placed[number], ceiling)
        ceiling = placed[number] - gap
    return placed
