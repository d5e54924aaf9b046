"""Entropy step by step, the stretches in which it is steady, and how surprising the tokens were."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from tracekit.report.figures.canvas import INK, draw
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, number, visible

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_STEPS = 250
"""Scored steps of a sequence that are drawn, from its first."""
MOST_SEQUENCES = 3

_LINE, _DOTS = "#0072b2", "#d55e00"
_NAMES = ["sequence_id", "position", "regime", "entropy_nats", "surprisal_nats"]


def timeline(steps: pd.DataFrame) -> Drawing:
    """Return entropy over position, a panel a sequence.

    Parameters
    ----------
    steps
        Rows of ``schema.SCORED`` of at most ``MOST_SEQUENCES`` sequences, each one's in order.
    """
    shown = steps.groupby("sequence_id", sort=False).head(MOST_STEPS)
    parts = list(shown.groupby("sequence_id", sort=False))

    def paint(axes: Axes) -> None:
        figure = cast("Figure", axes.figure)
        axes.remove()
        figure.set_size_inches(7.6, 0.5 + 2.1 * len(parts))
        top = 1.05 * float(shown[["entropy_nats", "nll_full"]].max().max())
        panels = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
        figure.subplots_adjust(0.09, 0.16 / len(parts) + 0.03, 0.99, 0.95, hspace=0.5)
        for panel, (name, part) in zip(panels, parts, strict=True):
            _panel(panel, part)
            panel.set(ylim=(0, max(top, 0.1)), ylabel="nats")
            panel.set_title(visible(str(name)), loc="left", fontsize=11)
        panels[-1].set_xlabel("position of the predicted token")

    told = steps.groupby("sequence_id", sort=False)["regime"].nunique()
    cut = len(steps) - len(shown)
    return Drawing(
        name="entropy-timeline",
        svg=draw("entropy-timeline", paint),
        caption=(
            "Line: entropy of the next-token distribution. Dots: surprisal of the token that came. "
            "Grounds alternate with stretches of steady entropy, the thick line is the mean of each "
            "(in nats). One run each, so no interval; the line breaks where steps are not scored."
            + (f" {count(cut)} later steps are not drawn." if cut else "")
        ),
        alt=(
            "Entropy over position: "
            + ", ".join(f"{name} has {_stretches(num)}" for name, num in told.items())
            + f"; mean entropy {number(float(steps['entropy_nats'].mean()))} nats."
        ),
        table=shown.rename(columns={"nll_full": "surprisal_nats"})[_NAMES].reset_index(drop=True),
    )


def _stretches(num: int) -> str:
    return "1 stretch" if num == 1 else f"{num} stretches"


def _panel(axes: Axes, part: pd.DataFrame) -> None:
    """Draw one sequence: line, dots, and its stretches."""
    at_S, entropy_S = (part[one].to_numpy(np.float64) for one in ("position", "entropy_nats"))
    axes.grid(visible=True, axis="y")
    for place, (_, stretch) in enumerate(part.groupby("regime", sort=True)):
        first, last = stretch["position"].min() - 0.5, stretch["position"].max() + 0.5
        mean = float(stretch["entropy_nats"].mean())
        axes.axvspan(first, last, color=INK, alpha=0.11 if place % 2 else 0.04, linewidth=0)
        axes.plot([first, last], [mean, mean], color=INK, linewidth=2.4, alpha=0.75)
        axes.text(
            last, 0.99, f"{mean:.2f} ", transform=axes.get_xaxis_transform(), ha="right", va="top"
        )
    gap_X = np.flatnonzero(np.diff(at_S) > 1) + 1
    axes.plot(
        np.insert(at_S, gap_X, np.nan), np.insert(entropy_S, gap_X, np.nan), color=_LINE, lw=1.3
    )
    _dots(axes, at_S, part["nll_full"].to_numpy(np.float64))
    axes.set_xlim(at_S[0] - 1, at_S[-1] + 1)


def _dots(axes: Axes, x_S: np.ndarray, y_S: np.ndarray) -> None:
    """Draw dots as one path of points with round ends: a tenth of the bytes of markers."""
    corner_XD = np.repeat(np.stack([x_S, y_S], axis=1), 2, axis=0)
    path = Path(corner_XD, np.tile([Path.MOVETO, Path.LINETO], len(x_S)))
    path.should_simplify = False  # It would drop what has no length.
    axes.add_patch(PathPatch(path, edgecolor=_DOTS, lw=3, alpha=0.55, fill=False, capstyle="round"))
