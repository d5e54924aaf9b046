"""What policies lose from bucket to bucket, of lengths or of steps, one line a policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter

from tracekit.report.figures.canvas import (
    REFERENCE,
    Style,
    draw,
    label_ends,
    lines,
    reference,
)
from tracekit.report.figures.figure import Drawing
from tracekit.report.figures.measure import Measure, bounded, chosen_names, titled
from tracekit.report.formats import sample_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from tracekit.report.load import Point

_FULL = "full cache"


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Curves over buckets: the x of a point is the number of its bucket.

    Parameters
    ----------
    name
        Of the figure.
    measure
        What y is.
    axis
        What the buckets are, with their unit.
    labels
        Names of the buckets, in order.
    points
        By policy, ascending bucket.
    kept
        By policy: the mean kept fraction at which it is shown.
    note
        Sentences at the end of the caption: what was chosen and left out.
    """

    name: str
    measure: Measure
    axis: str
    labels: Sequence[str]
    points: Mapping[str, Sequence[Point]]
    kept: Mapping[str, float]
    note: str


def bucket_curve(buckets: Buckets, looks: Mapping[str, Style]) -> Drawing:
    """Return the lines with their bootstrap bands.

    Parameters
    ----------
    buckets
        At least one bucket with a point.
    looks
        Style of each policy, the same in all figures.
    """
    measure = buckets.measure
    points = [point for curve in buckets.points.values() for point in curve]
    grey = sorted(set(buckets.points) - set(chosen_names(buckets.points, measure)))
    return Drawing(
        name=buckets.name,
        svg=_svg(buckets, looks),
        caption=(
            f"Level {measure.level}: {measure.meaning}; mean over sequences by {buckets.axis}. Bands: "
            f"95\u00a0% bootstrap intervals over sequences ({sample_sizes([p.n for p in points])}; "
            f"none below 3). {buckets.note}"
            + (f" Grey, without a name: {', '.join(grey)}." if grey else "")
        ),
        alt=_alt(buckets),
        table=_numbers(buckets),
    )


def _numbers(buckets: Buckets) -> pd.DataFrame:
    rows = [
        {
            "family": name,
            "name": point.name,
            "level": point.level,
            "causal": point.causal,
            "kept_frac": buckets.kept[name],
            "bucket": buckets.labels[round(point.x)],
            buckets.measure.column: point.mean,
        }
        | {key: value for key, value in asdict(point).items() if key in ("low", "high", "n")}
        for name, curve in buckets.points.items()
        for point in curve
    ]
    return pd.DataFrame(rows)


def _alt(buckets: Buckets) -> str:
    """Return how the policy that loses least changes from the first bucket to the last."""
    measure = buckets.measure
    causal = {name: c for name, c in buckets.points.items() if c[0].causal} or buckets.points
    least = min(causal, key=lambda one: (measure.sign * causal[one][-1].mean, one))
    first, last = causal[least][0], causal[least][-1]
    return (
        f"{measure.label[:1].upper()}{measure.label[1:]} by {buckets.axis}, a line a policy: least "
        f"in the last bucket {measure.write(last.mean)} ({least}), there "
        f"{measure.write(first.mean)} in the first."
    )


def _svg(buckets: Buckets, looks: Mapping[str, Style]) -> str:
    titles, styles = titled(buckets.points), bounded(looks, buckets.points)
    by_title = {titles[one]: curve for one, curve in buckets.points.items()}
    named = {titles[one] for one in chosen_names(buckets.points, buckets.measure)}
    points = [point for curve in buckets.points.values() for point in curve]

    def paint(axes: Axes) -> None:
        axes.set(xlabel=buckets.axis, xlim=(-0.3, len(buckets.labels) - 0.7))
        axes.xaxis.set_major_locator(FixedLocator(range(len(buckets.labels))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: buckets.labels[round(x)]))
        buckets.measure.scale(axes, points)
        ends = lines(axes, by_title, styles, named)
        low, high = axes.get_ylim()
        if low <= buckets.measure.full <= high:
            ends[_FULL] = reference(axes, buckets.measure.full)
        label_ends(axes, ends, styles | {_FULL: REFERENCE})

    return draw(buckets.name, paint)
