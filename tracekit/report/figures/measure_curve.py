"""What policies lose against the kept fraction, or the read fraction, one line a policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from tracekit.report.figures.canvas import (
    REFERENCE,
    Style,
    draw,
    kept_axis,
    label_ends,
    lines,
    reference,
    ring,
)
from tracekit.report.figures.figure import Drawing
from tracekit.report.figures.measure import HALF, Measure, bounded, chosen_names, titled
from tracekit.report.formats import count, number, percent, sample_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from tracekit.report.load import Point

_FULL, _NOISE = "full cache", "noise floor"
X_LABELS = {
    "kept_frac": ("kept fraction of the cache", "removed"),
    "read_frac": ("read fraction of the cache, a step", "not read"),
}
"""By what x is: the labels of the axis, below and above."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """All curves of one measure on one axis, and what is to be known of their points.

    Parameters
    ----------
    measure
        What y is.
    x_name
        What x is: ``kept_frac`` or ``read_frac``.
    points
        By policy, ascending x.
    noise_nats
        KL that rounding alone makes; what is not above it is not drawn. 0: none known.
    clipped, clamped
        By canonical text of the policy: cells whose budget was below what was to be protected, or
        above what the full cache held.
    """

    measure: Measure
    x_name: str
    points: Mapping[str, Sequence[Point]]
    noise_nats: float = 0.0
    clipped: Mapping[str, int] = field(default_factory=dict)
    clamped: Mapping[str, int] = field(default_factory=dict)

    @property
    def all(self) -> list[Point]:
        """All points, those that are not drawn too."""
        return [point for curve in self.points.values() for point in curve]

    @property
    def drawn(self) -> dict[str, list[Point]]:
        """Points above the noise floor, by policy; a logarithmic axis has no place for 0."""
        is_log = self.measure.spans_decades(self.all)
        above = {
            name: [p for p in curve if p.mean > self.noise_nats and (p.mean != 0 or not is_log)]
            if self.noise_nats or is_log
            else list(curve)
            for name, curve in self.points.items()
        }
        return {name: curve for name, curve in above.items() if curve}

    @property
    def flagged(self) -> list[Point]:
        """Drawn points some of whose cells were clipped or clamped."""
        drawn = [point for curve in self.drawn.values() for point in curve]
        return [p for p in drawn if self.clipped.get(p.name) or self.clamped.get(p.name)]


def measure_curve(curves: Curves, looks: Mapping[str, Style]) -> Drawing | None:
    """Return the curves with their bootstrap bands; None without a point above the noise.

    Parameters
    ----------
    curves
        What is drawn.
    looks
        Style of each policy, the same in all figures.
    """
    if not curves.drawn:
        return None
    measure, axis = curves.measure, curves.x_name.replace("_", "-")
    name = f"{measure.column.replace('_', '-')}-{measure.level}-by-{axis}"
    return Drawing(
        name=name,
        svg=_svg(name, curves, looks),
        caption=_caption(curves),
        alt=_alt(curves),
        table=numbers(curves),
    )


def numbers(curves: Curves) -> pd.DataFrame:
    """Return all points as rows, those too that are not drawn, with their flagged cells."""
    rows = [
        asdict(point)
        | {
            "num_clipped": curves.clipped.get(point.name, 0),
            "num_clamped": curves.clamped.get(point.name, 0),
        }
        for point in curves.all
    ]
    return (
        pd.DataFrame(rows)
        .drop(columns="x_name")
        .rename(columns={"x": curves.x_name, "mean": curves.measure.column})
    )


def _caption(curves: Curves) -> str:
    measure, points = curves.measure, curves.all
    what = "kept" if curves.x_name == "kept_frac" else "read"
    better = "Lower" if measure.sign > 0 else "Higher"
    told = (
        f"Level {measure.level}: {measure.meaning}; mean over sequences, against the fraction "
        f"{what}, as measured. Bands: 95\u00a0% bootstrap intervals over sequences "
        f"({sample_sizes([p.n for p in points])}; none below 3). {better} and further left is better."
    )
    return " ".join([told, *_notes(curves)])


def _notes(curves: Curves) -> list[str]:
    """Return sentences on bounds, grey lines, noise, and on flagged and left out cells."""
    notes, points = [], curves.all
    if curves.x_name == "read_frac":
        notes.append("Recall policies choose anew at each step what they read; they free nothing.")
    if bounds := sorted({p.family for p in points if not p.causal}):
        notes.append(f"Bounds look at later rows, no decoder has them: {', '.join(bounds)}.")
    if grey := sorted(set(curves.drawn) - set(chosen_names(curves.drawn, curves.measure))):
        notes.append(f"Grey, without a name: {', '.join(grey)}.")
    if curves.measure.spans_decades(points):
        notes.append("The full cache, 0, lies below the logarithmic axis.")
    if curves.noise_nats:
        left = len(points) - sum(map(len, curves.drawn.values()))
        hidden = f", {count(left)} points at or below it are not drawn" if left else ""
        notes.append(f"Rounding alone makes {number(curves.noise_nats)} nats{hidden}.")
    if curves.flagged:
        clipped, clamped = (
            sum(cells.get(p.name, 0) for p in points) for cells in (curves.clipped, curves.clamped)
        )
        notes.append(
            f"Ringed: points with cells whose budget was below what was to be protected "
            f"({count(clipped)} cells) or above what the full cache held ({count(clamped)})."
        )
    if left_out := sum(p.num_excluded for p in points):
        notes.append(f"Left out, for nothing was evicted there: {count(left_out)} cells.")
    return notes


def _alt(curves: Curves) -> str:
    """Return the least loss of a decoder's policy at a half or less, and the worst of all."""
    measure = curves.measure
    points = [point for curve in curves.drawn.values() for point in curve]
    causal = [p for p in points if p.causal] or points
    half = [p for p in causal if p.x <= HALF * 1.05]
    low = measure.best(half or causal)
    bad = measure.worst(points)
    what = "kept" if curves.x_name == "kept_frac" else "read"
    words = ("least loss", "most") if measure.sign > 0 else ("most agreement", "least")
    return (
        f"{measure.label[:1].upper()}{measure.label[1:]}, a line a policy: {words[0]} "
        f"{f'at half or less {what} ' if half else ''}{measure.write(low.mean)} "
        f"({low.family} at {percent(low.x)}), "
        f"{words[1]} of all {measure.write(bad.mean)} ({bad.family} at {percent(bad.x)})."
    )


def _svg(name: str, curves: Curves, looks: Mapping[str, Style]) -> str:
    drawn, measure = curves.drawn, curves.measure
    titles, styles = titled(drawn), bounded(looks, drawn)
    named = {titles[one] for one in chosen_names(drawn, measure)}
    by_title = {titles[one]: curve for one, curve in drawn.items()}
    points = [point for curve in drawn.values() for point in curve]

    def paint(axes: Axes) -> None:
        kept_axis(axes, *X_LABELS[curves.x_name])
        measure.scale(axes, points, curves.noise_nats)
        ends = lines(axes, by_title, styles, named)
        ring(axes, curves.flagged)
        low, high = axes.get_ylim()
        for label, y in ((_FULL, measure.full), (_NOISE, curves.noise_nats)):
            if low <= y <= high and (label == _FULL or y > 0):
                ends[label] = reference(axes, y)
        label_ends(axes, ends, styles | {_FULL: REFERENCE, _NOISE: REFERENCE})

    return draw(name, paint)
