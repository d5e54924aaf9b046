"""How entropies are spread in each domain: a panel a domain, all domains in grey behind it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tracekit.report.figures.canvas import INK, REFERENCE, draw
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, number, percent, sample_sizes, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BIN_NATS = 0.5
MOST_PANELS = 12
_COLUMNS = 3
_FILL = "#0072b2"
_SHORTEST = 22  # Letters of a domain that fit a panel.


def histogram(steps: pd.DataFrame, quantile: float) -> Drawing:
    """Return the share of steps by entropy on a logarithmic y axis.

    Parameters
    ----------
    steps
        ``sequence_id``, ``domain`` and ``entropy_nats`` of all scored steps.
    quantile
        Marked in each panel.
    """
    sizes = steps.groupby("domain").size().sort_values(ascending=False, kind="stable")
    domains = sorted(sizes.index[:MOST_PANELS])
    edges = BIN_NATS * np.arange(math.floor(steps["entropy_nats"].max() / BIN_NATS) + 2)
    shares = {name: _shares(steps[steps["domain"] == name], edges) for name in domains}
    whole = _shares(steps, edges)
    marks = {name: _mark(steps[steps["domain"] == name], quantile) for name in domains}

    def paint(axes: Axes) -> None:
        figure, panels = _panels(axes, len(domains))
        for panel, name in zip(panels.flat, domains, strict=False):
            _panel(panel, edges, shares[name], whole, marks[name])
            panel.set_title(_fitting(visible(name)), loc="left", fontsize=11)
            panel.set(xlim=(0, edges[-1]), ylim=(0.5 / len(steps), 1))
        figure.supxlabel("entropy of a step (nats)", fontsize=11)

    n = steps.groupby("domain")["sequence_id"].nunique()
    rest = len(sizes) - len(domains)
    least, most = (find(domains, key=lambda name: marks[name]) for find in (min, max))
    return Drawing(
        name="entropy-histogram",
        svg=draw("entropy-histogram", paint),
        caption=(
            f"Share of steps (log scale) by entropy in bins of {BIN_NATS:g} nats; grey line: all "
            f"{count(len(steps))} steps of all domains; dashed with its number: percentile "
            f"{100 * quantile:g}. {sample_sizes(list(n))} sequences a domain; means and intervals "
            "are in the table." + (f" {rest} smaller domains are not drawn." if rest else "")
        ),
        alt=(
            f"Entropy by domain: over all {percent(quantile)} of steps are at or below "
            f"{number(_mark(steps, quantile))} nats; by domain from {number(marks[least])} "
            f"({least}) to {number(marks[most])} ({most})."
        ),
        table=_table(shares, edges),
    )


def _table(shares: dict[str, np.ndarray], edges: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(
        [
            (name, low, high, share)
            for name, shares_B in shares.items()
            for low, high, share in zip(edges, edges[1:], shares_B, strict=False)
            if share > 0
        ],
        columns=["domain", "from_nats", "below_nats", "share_of_steps"],
    )


def _panels(axes: Axes, num: int) -> tuple[Figure, np.ndarray]:
    """Return the figure and so many panels in place of the axes, and what they share."""
    figure, num_rows = cast("Figure", axes.figure), -(-num // _COLUMNS)
    axes.remove()
    figure.set_size_inches(7.6, 0.6 + 1.75 * num_rows)
    panels = figure.subplots(num_rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(0.1, 0.24 / num_rows + 0.03, 0.99, 0.93, hspace=0.5, wspace=0.12)
    for panel in panels.flat[num:]:
        panel.remove()
    for column in range(min(_COLUMNS, num)):
        lowest = panels[(num - 1 - column) // _COLUMNS, column]
        lowest.tick_params(labelbottom=True)
    panels[0, 0].set_yscale("log")
    panels[0, 0].yaxis.set_major_locator(LogLocator(numticks=9))
    panels[0, 0].yaxis.set_minor_locator(NullLocator())
    panels[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}\u00a0%"))
    return figure, panels


def _mark(steps: pd.DataFrame, quantile: float) -> float:
    return float(np.quantile(steps["entropy_nats"], quantile, method="inverted_cdf"))


def _shares(steps: pd.DataFrame, edges: np.ndarray) -> np.ndarray:
    counts, _ = np.histogram(steps["entropy_nats"], edges)
    shares: np.ndarray = counts / max(len(steps), 1)
    return shares


def _panel(
    axes: Axes, edges: np.ndarray, share: np.ndarray, whole: np.ndarray, mark: float
) -> None:
    axes.stairs(share, edges, fill=True, color=_FILL, alpha=0.55)
    axes.stairs(whole, edges, color=INK, alpha=0.5, linewidth=1)
    axes.axvline(mark, color=REFERENCE.color, linestyle=REFERENCE.dash, linewidth=1)
    axes.text(mark, 0.98, f" {mark:.2f}", transform=axes.get_xaxis_transform(), va="top")


def _fitting(name: str) -> str:
    return name if len(name) <= _SHORTEST else f"{name[: _SHORTEST - 1]}\u2026"
