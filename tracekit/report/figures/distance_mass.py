"""How far attention reaches: its mass by distance from query to key, the first key apart."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter

from tracekit import schema
from tracekit.measure.stats import bootstrap_mean
from tracekit.report.figures.canvas import INK, draw, label_ends, line, styles
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, percent, sample_sizes
from tracekit.report.load import Point

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike, NDArray

    from tracekit.report.figures.canvas import Style
    from tracekit.report.load import Results

NAME = "attention-by-distance"

_THIRDS = {1: ("all",), 2: ("shallow", "deep"), 3: ("shallow", "middle", "deep")}
_FIRST_KEY_AT = -2.0  # Left of the bins, where no distance is.
_NEAR_BINS = 6  # Distances below 32.
_MOST_TICKS = 10


def layer_rows(results: Results) -> pd.DataFrame:
    """Return the attention of whole layers: rows of ``schema.ATTENTION_RESULTS``."""
    rows = results.table(schema.ATTENTION_RESULTS)
    return rows[rows["kv_head"] == schema.ALL].reset_index(drop=True)


def layer_thirds(layers: Iterable[int]) -> dict[str, list[int]]:
    """Return layers in thirds by depth, by a name such as ``shallow, layers 0-9``.

    Fewer than three layers make as many groups; the first thirds are larger by one where the number
    of layers does not divide.
    """
    numbers = sorted(set(layers))
    size = min(3, len(numbers))
    parts = [part.tolist() for part in np.array_split(np.array(numbers, dtype=int), size)]
    return {
        f"{name}, layers {part[0]}-{part[-1]}" if part[1:] else f"{name}, layer {part[0]}": part
        for name, part in zip(_THIRDS[size], parts, strict=True)
    }


def measured_point(name: str, x: float, values_by_sequence: ArrayLike, seed: int) -> Point:
    """Return the mean over sequences with its interval, as a point of a line."""
    found = bootstrap_mean(values_by_sequence, seed=seed)
    mean, low, high = (
        float("nan") if one is None else one for one in (found.mean, found.low, found.high)
    )
    return Point(
        family=name,
        name=name,
        level="local",
        causal=True,
        x_name="",
        target=float("nan"),
        x=x,
        mean=mean,
        low=low,
        high=high,
        n=found.n,
        num_excluded=0,
    )


def windows_note(results: Results) -> str:
    """Return what a reader must know of layers that see a window alone; '' without any."""
    windows = {one.index: one.window for one in results.spec.layers if one.window}
    if not windows:
        return ""
    sizes = ", ".join(map(count, sorted(set(windows.values()))))
    return (
        f" {len(windows)} of {len(results.spec.layers)} layers see no more than their newest "
        f"{sizes} keys: nothing of theirs lies farther away."
    )


def attention_by_distance(results: Results) -> Drawing | None:
    """Return a line for each third of the layers; None where distances were not measured."""
    rows = layer_rows(results)
    rows = rows[rows["distance_mass"].notna()]
    if rows.empty:
        return None
    mass_RB = _padded(rows["distance_mass"])
    bins = _bin_labels(mass_RB.shape[1])
    curves = {
        name: _points(name, rows, mass_RB, rows["layer"].isin(part), results.run["seed"])
        for name, part in layer_thirds(rows["layer"]).items()
    }
    near = {name: sum(p.mean for p in curve[1 : 1 + _NEAR_BINS]) for name, curve in curves.items()}
    told = "; ".join(
        f"{name}: {percent(curve[0].mean)} on the first key, {percent(near[name])} within 32 tokens"
        for name, curve in curves.items()
    )
    sizes = sample_sizes([point.n for curve in curves.values() for point in curve])
    return Drawing(
        name=NAME,
        svg=_svg(curves, bins),
        caption=(
            "Level local: mean share of a row's attention, over scored rows, query heads and the "
            f"layers of a third, then over sequences ({sizes}). Bands, and bars at the first key: "
            f"95\u00a0% bootstrap intervals over sequences (seed {results.run['seed']}; none below "
            "3). Ticks name the nearest distance of a bin; each bin is twice as wide as the one "
            "before. The sequence's first key stands apart, at whatever distance; with it the shares "
            "of a line add up to 100\u00a0%. Short sequences count as 0 at distances that they do "
            f"not have.{windows_note(results)}"
        ),
        alt=f"Attention mass by distance, {told}.",
        table=_numbers(curves, bins),
    )


def _padded(lists: pd.Series[Any]) -> NDArray[np.float64]:
    """Return lists of several lengths as rows, 0 where a sequence has no such distance."""
    lengths = lists.map(len).to_numpy()
    is_there = np.arange(lengths.max()) < lengths[:, None]
    mass_RB = np.zeros(is_there.shape)
    mass_RB[is_there] = np.concatenate(lists.to_list())
    return mass_RB


def _bin_labels(num_bins: int) -> list[str]:
    """Return the distances of each bin: 0, 1, 2-3, 4-7 ..."""
    starts = [0, *(1 << b for b in range(num_bins - 1))]
    ends = [(1 << b) - 1 for b in range(num_bins)]
    return [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]


def _points(
    name: str, rows: pd.DataFrame, mass_RB: NDArray[np.float64], is_of: pd.Series[bool], seed: int
) -> list[Point]:
    """Return the points of one third: the first key, then the bins."""
    mass = pd.DataFrame(np.column_stack([rows["first_1_mass"], mass_RB]), index=rows.index)
    mean_SB = mass[is_of].groupby(rows["sequence_id"][is_of]).mean().to_numpy()
    places = [_FIRST_KEY_AT, *map(float, range(mass_RB.shape[1]))]
    return [measured_point(name, x, one, seed) for x, one in zip(places, mean_SB.T, strict=True)]


def _numbers(curves: dict[str, list[Point]], bins: list[str]) -> pd.DataFrame:
    table = pd.DataFrame([asdict(point) for curve in curves.values() for point in curve])
    table["distance_tokens"] = ["first key", *bins] * len(curves)
    table = table.rename(columns={"name": "layers", "mean": "mass"})
    return table[["layers", "level", "distance_tokens", "mass", "low", "high", "n"]]


def _svg(curves: dict[str, list[Point]], bins: list[str]) -> str:
    looks = styles(curves)

    def paint(axes: Axes) -> None:
        axes.set(xlabel="distance from query to key, tokens (bins double)")
        axes.set(ylabel="share of the attention")
        ends = {name: line(axes, curve[1:], looks[name]) for name, curve in curves.items()}
        for number, (name, curve) in enumerate(curves.items()):
            _first_key(axes, curve[0], looks[name], 0.22 * (number - (len(curves) - 1) / 2))
        axes.axvline(_FIRST_KEY_AT / 2, color=INK, linewidth=0.8, alpha=0.5)
        step = -(-len(bins) // _MOST_TICKS)
        shown = range(0, len(bins), step)
        axes.set_xticks([_FIRST_KEY_AT, *shown])
        axes.set_xticklabels(["first key", *(bins[at].split("-")[0] for at in shown)])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol="\u00a0%"))
        label_ends(axes, ends, looks)

    return draw(NAME, paint)


def _first_key(axes: Axes, point: Point, style: Style, shift: float) -> None:
    """Draw the mass of the first key, moved aside so that intervals do not hide each other."""
    x = point.x + shift
    axes.plot([x], [point.mean], color=style.color, linestyle="", marker=style.marker)
    axes.plot([x, x], [point.low, point.high], color=style.color, linewidth=1.2)
