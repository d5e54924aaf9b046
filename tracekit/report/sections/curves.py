"""What each policy loses against what it keeps: curves by level, the front, and the calibration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tracekit.report.blocks import Absent, Block, Heading, Section, Text
from tracekit.report.figures.calibration import calibrated, calibration_scatter
from tracekit.report.figures.canvas import styles
from tracekit.report.figures.measure import KEY, KL, PERPLEXITY, SAME_TOP, Measure
from tracekit.report.figures.measure_curve import Curves, measure_curve
from tracekit.report.figures.pareto import pareto
from tracekit.report.figures.perplexity import perplexity_changes
from tracekit.report.formats import count, number, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracekit.report.figures.canvas import Style
    from tracekit.report.figures.figure import Figure
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

_HOW = {
    "local": "tracekit simulate TRACE -o RESULTS --level local",
    "predicted": "tracekit simulate TRACE -o RESULTS --level predicted",
    "propagated": "tracekit simulate TRACE -o RESULTS --level propagated",
}
_NEEDS = {"predicted": " (the trace needs influence probes: tracekit record --capture influence)"}
_X_NAMES = ("kept_frac", "read_frac")


def section(results: Results, options: Options) -> Section | Absent:
    """Return the curves of all levels, the front, and how far a prediction can be trusted."""
    del options
    looks = styles(results.families("kv"))
    curves = [made for level in KEY if (made := _of_level(results, level, looks))]
    if not curves:
        return Absent(what="Losses of KV policies", command="tracekit simulate TRACE -o RESULTS")
    blocks = [block for made in curves for block in made]
    absent = [
        Absent(what=f"Curves of level {one}{_NEEDS.get(one, '')}", command=command)
        for one, command in _HOW.items()
        if one not in results.levels
    ]
    return Section(
        name="curves",
        title="What policies lose, by what they keep",
        short="Curves",
        blocks=(
            *blocks,
            *_other_measures(results, looks),
            *_front(results, looks),
            *_calibration(results, looks),
            *absent,
        ),
    )


def _of_level(results: Results, level: str, looks: Mapping[str, Style]) -> list[Block]:
    """Return the curves of one level under a heading; those of recall policies in their own."""
    measure = KEY[level]
    figures = _figures(results, measure, looks)
    return [Heading(text=f"Level {level}"), *figures] if figures else []


def _figures(results: Results, measure: Measure, looks: Mapping[str, Style]) -> list[Figure]:
    """Return the figures of one measure: against what is kept, and against what is read."""
    made = []
    for x_name in _X_NAMES:
        points = results.curves("kv", measure.column, level=measure.level, x_name=x_name)
        made.append(_figure(results, measure, x_name, points, looks))
    return [figure for figure in made if figure is not None]


def _figure(
    results: Results,
    measure: Measure,
    x_name: str,
    points: Mapping[str, Sequence[Point]],
    looks: Mapping[str, Style],
) -> Figure | None:
    flags = {name: _flagged(results, measure.level, name) for name in ("clipped", "clamped")}
    noise = _noise_nats(results) if measure is KL else 0.0
    curves = Curves(measure=measure, x_name=x_name, points=points, noise_nats=noise, **flags)
    return measure_curve(curves, looks)


def _flagged(results: Results, level: str, flag: str) -> dict[str, int]:
    """Return how many cells of each policy carry a flag, where any does."""
    rows = results.whole[results.whole["level"] == level]
    counts = rows.loc[rows[f"is_{flag}"].eq(True), "policy"].value_counts()
    return {str(policy): int(n) for policy, n in counts.items()}


def _noise_nats(results: Results) -> float:
    """Return the KL that rounding makes of the full cache, mean over sequences; 0: not known."""
    rows = results.whole
    full = rows[(rows["level"] == "propagated") & (rows["family"] == "full")]
    mean = float(full["noise_kl_nats"].astype(np.float64).mean())
    return 0.0 if math.isnan(mean) else mean


def _other_measures(results: Results, looks: Mapping[str, Style]) -> list[Block]:
    """Return agreement of the most likely tokens and, of given text, perplexity."""
    if "propagated" not in results.levels:
        return []
    perplexity: list[Block] = [
        figure
        for x_name in _X_NAMES
        if (points := perplexity_changes(results, x_name))
        and (figure := _figure(results, PERPLEXITY, x_name, points, looks))
    ]
    no_given = Absent(
        what="Change of perplexity (the texts here were made by the model itself, which is blind to "
        "its own faults)",
        command="tracekit record --model MODEL --text FILE -o TRACE",
    )
    return [*_figures(results, SAME_TOP, looks), *(perplexity or [no_given])]


def _front(results: Results, looks: Mapping[str, Style]) -> list[Block]:
    """Return the front at the deepest level that has a KL."""
    for level in ("propagated", "predicted"):
        measure = KEY[level]
        if curves := results.methods("kv", measure.column, level=level):
            figure = pareto(
                measure,
                curves,
                looks,
                results.means("kv", "kv_bytes", level=level),
                _full_bytes(results, level),
            )
            return [Heading(text=f"Cache against KL: the front, level {level}"), figure]
    return []


def _full_bytes(results: Results, level: str) -> float:
    rows = results.whole
    full = rows[(rows["level"] == level) & (rows["family"] == "full")]
    return float(full["full_kv_bytes"].mean())


def _calibration(results: Results, looks: Mapping[str, Style]) -> list[Block]:
    figure = calibration_scatter(results, looks)
    if figure is None:
        return []
    heading = Heading(text="How far a prediction can be trusted")
    ordered = calibrated(results, "pairs_ordered")
    if math.isnan(ordered["value"]):
        few = (
            "Too few cells were run at all three levels to say how far a prediction can be trusted."
        )
        return [heading, Text(text=few), figure]
    times = calibrated(results, "propagated_over_predicted")
    off = calibrated(results, "left_out_factor", "as predicted")["value"]
    pairs = calibrated(results, "pairs")
    within = (
        "" if math.isnan(off) else f"; half of the cells are off by a factor below {number(off)}"
    )
    return [
        heading,
        Text(
            text=(
                "Of two policies at the same kept fraction, the prediction puts the better one first "
                f"in {percent(ordered['value'])} of {count(pairs['value'])} pairs of "
                f"{count(ordered['num_cells'])} cells{_interval(ordered, percent)}. In the median of "
                f"{count(times['num_cells'])} cells the propagated KL is {number(times['value'])} times "
                f"the predicted{_interval(times, number)}{within}: good for choosing, not for promising."
            )
        ),
        figure,
    ]


def _interval(found: Mapping[str, float], write: Callable[[float], str]) -> str:
    if math.isnan(found["low"]):
        return " (no interval below 3 sequences)"
    return f" (95\u00a0% interval {write(found['low'])} to {write(found['high'])})"
