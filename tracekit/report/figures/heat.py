"""A map of numbers by layer: colours, labels, and the words for its highest cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit.report.figures.figure import Map
from tracekit.report.figures.pixels import pixels, scale

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import pandas as pd
    from numpy.typing import NDArray

_TOLD = 5


def layer_heat(
    name: str,
    values: NDArray[np.float64],
    columns: Sequence[str],
    *,
    write: Callable[[float], str],
    caption: str,
    what: str,
    table: pd.DataFrame,
    marked: Collection[int] = (),
) -> Map:
    """Return a map whose rows are layers, layer 0 on top.

    Parameters
    ----------
    name
        Of the figure.
    values
        [L, columns]; NaN where nothing was measured; at least one number.
    columns
        Label of each column.
    write
        How a value is written.
    caption
        Level, meaning, n; the highest cells are added.
    what
        What the numbers are, for the alternative text.
    table
        The numbers.
    marked
        Layers that are pointed at.
    """
    top = float(np.nanmax(values)) or 1.0
    # One column has its name in the other words of the figure.
    names = list(columns) if len(columns) > 1 else [""]
    told = ", ".join(
        " ".join(
            filter(None, (f"layer {layer}", names[column], write(float(values[layer, column]))))
        )
        for layer, column in highest(values)
    )
    hatched = " Hatched: nothing to measure there." if np.isnan(values).any() else ""
    layer, column = highest(values)[0]
    place = ", ".join(filter(None, (f"layer {layer}", names[column])))
    return Map(
        name=name,
        png=pixels(values / top),
        legend_png=scale(),
        rows=tuple(map(str, range(len(values)))),
        columns=tuple(columns),
        marked=tuple(str(one) for one in sorted(marked)),
        row_axis="layer, 0 (the input side) at the top",
        legend=(write(0.0), write(top / 2), write(top)),
        caption=f"{caption} Highest: {told}.{hatched}",
        alt=(
            f"Map of {what}: the largest is {write(float(values[layer, column]))} ({place}), the "
            f"mean over all cells {write(float(np.nanmean(values)))}."
        ),
        table=table,
    )


def highest(values: NDArray[np.float64], number: int = _TOLD) -> list[tuple[int, int]]:
    """Return row and column of the largest values, largest first; of equals the upper left first."""
    known = np.where(np.isnan(values), -np.inf, values)
    order = np.argsort(-known, axis=None, kind="stable")[: min(number, np.isfinite(known).sum())]
    return [divmod(int(one), values.shape[1]) for one in order]
