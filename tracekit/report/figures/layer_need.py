"""How much of the cache each layer needs by its attention: the recommended kept fraction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator, PercentFormatter

from tracekit.report.figures.canvas import INK, Style, draw, label_ends, line
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import percent, sample_sizes
from tracekit.report.load import Point

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

NAME = "needed-by-layer"

_LOOKS = {"needed": Style("#0072b2", "-", "o"), "its mean": Style(INK, (0, (4, 3)), "")}
_NUMBERS = ["layer", "level", "kept_frac", "low", "high", "n", "mean_frac", "effective_keys"]


def layer_need(rows: pd.DataFrame) -> Drawing:
    """Return the kept fraction that each layer needs, with its interval.

    Parameters
    ----------
    rows
        Of ``schema.RECOMMENDED``, at least one with a kept fraction.
    """
    rows = rows[rows["kept_frac"].notna()].sort_values("layer")
    first = rows.iloc[0]
    least, most = (rows.loc[getattr(rows["kept_frac"], one)()] for one in ("idxmin", "idxmax"))
    return Drawing(
        name=NAME,
        svg=_svg(rows),
        caption=(
            f"Level {first['level']}: the part of the keys seen at the eviction point that a layer "
            f"must keep so that {percent(first['quantile'])} of later rows and heads, on "
            f"{percent(first['quantile'])} of sequences, keep {percent(first['mass_frac'])} of their "
            "attention mass. Solid: that quantile with its 95\u00a0% bootstrap interval over "
            f"sequences ({sample_sizes(rows['n'])}; none below 3); dashed: the mean over sequences. "
            "Attention mass is no loss: what a layer's errors do to the output is in the maps above."
        ),
        alt=(
            f"Kept fraction needed by layer: least {percent(least['kept_frac'])} (layer "
            f"{least['layer']}), most {percent(most['kept_frac'])} (layer {most['layer']})."
        ),
        table=rows[_NUMBERS],
    )


def _svg(rows: pd.DataFrame) -> str:
    def paint(axes: Axes) -> None:
        axes.set(xlabel="layer, 0 at the input side", ylim=(0, 1))
        axes.set_ylabel("kept fraction needed (removed: the rest)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
        ends = {
            "needed": line(axes, _points(rows, "kept_frac"), _LOOKS["needed"]),
            "its mean": line(axes, _points(rows, "mean_frac"), _LOOKS["its mean"]),
        }
        label_ends(axes, ends, _LOOKS)

    return draw(NAME, paint)


def _points(rows: pd.DataFrame, column: str) -> list[Point]:
    """Return one point a layer; the interval is that of the quantile alone."""
    is_quantile = column == "kept_frac"
    return [
        Point(
            family=column,
            name=column,
            level=str(row["level"]),
            causal=True,
            x_name="layer",
            target=float("nan"),
            x=float(row["layer"]),
            mean=float(row[column]),
            low=float(row["low"]) if is_quantile else float("nan"),
            high=float(row["high"]) if is_quantile else float("nan"),
            n=int(row["n"]),
            num_excluded=0,
        )
        for row in rows.to_dict("records")
    ]
