"""How much of the needles a policy still holds, by their depth and the length of the text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.patches import Rectangle

from tracekit.measure.stats import bootstrap_mean
from tracekit.report.figures.canvas import INK, draw
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, percent, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from tracekit.measure.stats import Interval

NAME = "needles-by-depth-and-length"

DEPTHS = tuple(f"{low}-{low + 20}\u00a0%" for low in range(0, 100, 20))
"""Bins of depth: where in its text the needle begins, the beginning first."""

_COLORS = "cividis"
_DARK = 0.18  # Luminance below which white has more contrast than black.
_COLUMNS = 3  # Panels side by side.
_MOST_TICKS = 5  # Lengths that have room under a panel.


def depth_bin(depth_frac: float) -> int:
    """Return the number of the bin in ``DEPTHS`` that holds a depth from 0 to 1."""
    return min(int(depth_frac * len(DEPTHS)), len(DEPTHS) - 1)


def length_bin(num_tokens: int) -> int:
    """Return the number of a bin of lengths, which double: 8 for 256 to 511 tokens."""
    return int(num_tokens).bit_length() - 1


def length_name(number: int) -> str:
    """Return the lengths of a bin, in tokens."""
    return f"{count(1 << number)}-{count((2 << number) - 1)}"


@dataclass(frozen=True, kw_only=True)
class Needle:
    """What a policy holds of the needle of one sequence.

    Parameters
    ----------
    family, policy
        Short name and canonical text of the policy.
    sequence_id
        The sequence.
    kept_frac
        Bytes that the policy holds over those of the full cache.
    held_frac
        Share of the needle's entries that it holds.
    depth_frac
        Where the needle begins, over the length of its text; NaN where that is not known.
    length_tokens
        Length of the text that the needle lies in.
    is_bound
        The policy looks ahead: no decoder has it.
    flags
        What is odd of this cell: clipped, clamped; '' for nothing.
    """

    family: str
    policy: str
    sequence_id: str
    kept_frac: float
    held_frac: float
    depth_frac: float
    length_tokens: int
    is_bound: bool
    flags: str


@dataclass(frozen=True)
class _Cell:
    """The needles of a policy in one bin of depth and one of length."""

    family: str
    row: int
    column: int
    held: Interval

    @property
    def mean(self) -> float:
        return 0.0 if self.held.mean is None else self.held.mean

    @property
    def text(self) -> str:
        where = f"depth {DEPTHS[self.row]}, {length_name(self.column)} tokens"
        return f"{percent(self.mean)} ({visible(self.family)}, {where})"


def needle_map(needles: Sequence[Needle], seed: int) -> Drawing:
    """Return a panel a policy: depth down, length across, the share held written in each cell.

    Parameters
    ----------
    needles
        One at least, all of known depth; their families in the order of the panels.
    seed
        Of the intervals.
    """
    cells = _cells(needles, seed)
    kept: dict[str, list[float]] = {}
    for one in needles:
        kept.setdefault(one.family, []).append(one.kept_frac)
    fractions = ", ".join(f"{visible(name)} {percent(fmean(of))}" for name, of in kept.items())
    ascending = sorted(cells, key=lambda cell: cell.mean)
    n = len({one.sequence_id for one in needles})
    return Drawing(
        name=NAME,
        svg=_svg(cells, list(kept)),
        caption=(
            "Level local: share of a needle's entries that is held, in per cent, mean over "
            f"sequences (n\u00a0=\u00a0{n} needles; of each cell, with its interval, in the table), at "
            f"measured kept fractions of {fractions}. Down: where in its text the needle begins; "
            "across: length of that text, bins double. Bright is much, dark little; a dot: no "
            f"needle lies there. Lowest: {'; '.join(cell.text for cell in ascending[:3])}."
        ),
        alt=(
            f"Needles held by depth and length, a panel a policy: least {ascending[0].text}, most "
            f"{ascending[-1].text}."
        ),
        table=pd.DataFrame(
            {
                "family": cell.family,
                "level": "local",
                "kept_frac": fmean(kept[cell.family]),
                "depth": DEPTHS[cell.row],
                "length_tokens": length_name(cell.column),
                "needle_kept": cell.held.mean,
                "low": cell.held.low,
                "high": cell.held.high,
                "n": cell.held.n,
            }
            for cell in cells
        ).astype({"low": "float64", "high": "float64"}),
    )


def _cells(needles: Sequence[Needle], seed: int) -> list[_Cell]:
    """Return the cells that have needles: by policy in the order given, depth, length."""
    order = {name: place for place, name in enumerate(dict.fromkeys(n.family for n in needles))}
    held: dict[tuple[str, int, int], list[float]] = {}
    for one in needles:
        key = (one.family, depth_bin(one.depth_frac), length_bin(one.length_tokens))
        held.setdefault(key, []).append(one.held_frac)
    keys = sorted(held, key=lambda key: (order[key[0]], *key[1:]))
    return [_Cell(*key, bootstrap_mean(held[key], seed=seed)) for key in keys]


def _svg(cells: Sequence[_Cell], families: Sequence[str]) -> str:
    columns = [cell.column for cell in cells]
    lengths = range(min(columns), max(columns) + 1)

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        across = min(_COLUMNS, len(families))
        down = math.ceil(len(families) / _COLUMNS)
        for number, family in enumerate(families):
            row, column = divmod(number, across)
            width, height = 0.86 / across, 0.85 / down
            left, top = 0.13 + column * width, 0.93 - row * height
            panel = axes.figure.add_axes((left, top - height + 0.08, 0.9 * width, height - 0.08))
            panel.set_title(visible(family), fontsize=10, pad=4)
            _grid(
                panel, lengths, has_rows=column == 0, has_columns=number + across >= len(families)
            )
            of = [cell for cell in cells if cell.family == family]
            _fill(panel, {(cell.row, cell.column): cell.mean for cell in of}, lengths)
        axes.figure.text(0.55, 0.04, "length of the text, tokens (bins double)", ha="center")
        axes.figure.text(0.012, 0.52, "depth of the needle", rotation=90, va="center")

    return draw(NAME, paint)


def _grid(panel: Axes, lengths: range, *, has_rows: bool, has_columns: bool) -> None:
    """Set the limits of a panel, the first depth on top, and its ticks where it is at an edge."""
    panel.set(xlim=(0, len(lengths)), ylim=(len(DEPTHS), 0))
    panel.set_xticks(np.arange(len(lengths)) + 0.5)
    panel.set_yticks(np.arange(len(DEPTHS)) + 0.5)
    step = -(-len(lengths) // _MOST_TICKS)
    names = ["" if at % step else count(1 << one) for at, one in enumerate(lengths)]
    panel.set_xticklabels(names if has_columns else [""] * len(names), fontsize=9)
    panel.set_yticklabels(DEPTHS if has_rows else [""] * len(DEPTHS), fontsize=9)
    panel.tick_params(length=0)


def _fill(panel: Axes, kept: dict[tuple[int, int], float], lengths: range) -> None:
    """Colour each cell and write its number in it, black or white, whichever stands out."""
    for row in range(len(DEPTHS)):
        for at, column in enumerate(lengths):
            value = kept.get((row, column))
            text, ink = "\u00b7", INK
            if value is not None:
                color = colormaps[_COLORS](value)
                panel.add_patch(Rectangle((at, row), 1, 1, facecolor=color, linewidth=0))
                text, ink = f"{100 * value:.0f}", _ink(color)
            panel.text(at + 0.5, row + 0.53, text, color=ink, ha="center", va="center", fontsize=9)


def _ink(color: tuple[float, ...]) -> str:
    """Return black or white, whichever has more contrast (WCAG 2.2: at least 4.5 either way)."""
    channels = np.array(color[:3])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return "#ffffff" if float(linear @ [0.2126, 0.7152, 0.0722]) < _DARK else "#000000"
