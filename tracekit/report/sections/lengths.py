"""What policies lose and hold by the length of a text, and by distance from the eviction point."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.blocks import Absent, Block, Details, Heading, Section, Text
from tracekit.report.estimates import bare, cell, compact, short
from tracekit.report.figures.bucket_curve import Buckets, bucket_curve
from tracekit.report.figures.canvas import styles
from tracekit.report.figures.distance_curve import distance_curve, distance_rows
from tracekit.report.figures.measure import ERROR, HALF, KEY, Measure, nearest, titled
from tracekit.report.formats import NOTHING, percent, sample_sizes, size
from tracekit.report.tables import Cell, HtmlTable, text_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

QUARTER = 0.25
"""Kept fraction of the second, folded table."""

_COLUMNS = {
    "local": "error (%), local",
    "predicted": "KL (nats a token), predicted",
    "propagated": "KL (nats a token), propagated",
}


def section(results: Results, options: Options) -> Section | Absent:
    """Return tables by length bucket, curves where there are several, and loss by distance."""
    del options
    buckets = results.buckets("kv")
    levels = [level for level in KEY if level in results.levels]
    chosen = _chosen(results, levels[0], HALF) if levels else {}
    if not chosen or not buckets:
        return Absent(what="Losses by length of text", command="tracekit simulate TRACE -o RESULTS")
    quarter = _chosen(results, levels[0], QUARTER)
    quarter = {name: point for name, point in quarter.items() if point != chosen[name]}
    blocks: list[Block] = [
        _by_length(results, chosen, levels[0]),
        *_curves(results, levels, chosen),
    ]
    blocks.append(_table(results, HALF, chosen))
    if quarter:
        table = _table(results, QUARTER, quarter)
        title = f"The same near {percent(QUARTER)} kept"
        blocks.append(Details(summary=title, blocks=(table,)))
    return Section(
        name="lengths",
        title="Does length matter?",
        short="Lengths",
        blocks=(*blocks, *_by_distance(results, levels, chosen)),
    )


def _chosen(results: Results, level: str, frac: float) -> dict[str, Point]:
    """Return each policy's point nearest a kept fraction, over all lengths: the same in all."""
    curves = results.curves("kv", KEY[level].column, level=level)
    return {name: nearest(curve, frac) for name, curve in curves.items()}


def _by_length(results: Results, chosen: Mapping[str, Point], level: str) -> Text:
    """Return for how many policies long texts lose more, and what the cache does there."""
    measure = KEY[level]
    buckets = [
        one
        for one in results.buckets("kv")
        if results.at("kv", measure.column, level=level, bucket=one)
    ]
    if len(buckets) < 2:
        there = ", ".join(buckets) or "none has a result"
        return Text(text=f"Texts of one length bucket alone ({there}, in tokens): no comparison.")
    short, long = (
        results.at("kv", measure.column, level=level, bucket=one)
        for one in (buckets[0], buckets[-1])
    )
    pairs = [
        (short[p.cell], long[p.cell])
        for p in chosen.values()
        if p.causal and p.cell in short and p.cell in long
    ]
    more = sum(long.low > short.high for short, long in pairs)
    less = sum(long.high < short.low for short, long in pairs)
    return Text(
        text=(
            f"Level {level}, at about half kept, {buckets[-1]} against {buckets[0]} tokens: of "
            f"{len(pairs)} policies {more} lose more on the longer texts and {less} less, with "
            f"intervals that do not overlap; {len(pairs) - more - less} show no clear difference. "
            "Longer texts may be of other domains too: length is not all that differs."
            f"{_slope(results, chosen, level, buckets)}"
        )
    )


def _slope(results: Results, chosen: Mapping[str, Point], level: str, buckets: list[str]) -> str:
    """Return how the bytes grow from the shortest to the longest bucket, full and reduced."""
    full, held = (
        [results.at("kv", column, level=level, bucket=one) for one in (buckets[0], buckets[-1])]
        for column in ("full_kv_bytes", "kv_bytes")
    )
    causal = [p for p in chosen.values() if p.causal and all(p.cell in at for at in (*full, *held))]
    if not causal:
        return ""
    best = KEY[level].best(causal)
    return (
        f" The full cache grows from {size(full[0][best.cell].mean)} to "
        f"{size(full[1][best.cell].mean)} on average, under {best.family} ("
        f"{percent(best.x)} kept) from {size(held[0][best.cell].mean)} to "
        f"{size(held[1][best.cell].mean)}."
    )


def _curves(results: Results, levels: list[str], chosen: Mapping[str, Point]) -> list[Block]:
    """Return a figure for each level with intervals in two buckets, at least for the first level."""
    made = [one for level in levels if (one := _buckets(results, KEY[level], chosen))]
    sure = [
        one
        for one in made
        if all(p.n >= MIN_SEQUENCES for curve in one.points.values() for p in curve)
    ]
    looks = styles(results.families("kv"))
    return [bucket_curve(one, looks) for one in sure or made[:1]]


def _buckets(results: Results, measure: Measure, chosen: Mapping[str, Point]) -> Buckets | None:
    """Return the curves over length buckets; None where fewer than two have a point."""
    by_bucket = {
        bucket: at
        for bucket in results.buckets("kv")
        if (at := results.at("kv", measure.column, level=measure.level, bucket=bucket))
    }
    if len(by_bucket) < 2:
        return None
    points = {
        name: [
            replace(at[point.cell], x=float(place))
            for place, at in enumerate(by_bucket.values())
            if point.cell in at
        ]
        for name, point in chosen.items()
    }
    points = {name: curve for name, curve in points.items() if curve}
    # Levels may be of different sequences: what is kept is told of those whose loss is shown.
    of_level = results.at("kv", measure.column, level=measure.level)
    kept = {name: of_level[chosen[name].cell].x for name in points}
    shown = ", ".join(f"{name} {percent(frac)}" for name, frac in kept.items())
    return Buckets(
        name=f"loss-by-length-{measure.level}",
        measure=measure,
        axis="length of the sequence in tokens",
        labels=list(by_bucket),
        points=points,
        kept=kept,
        note=(
            "Each policy asked for the amount whose kept fraction is nearest a half; kept at level "
            f"{measure.level}, over all lengths: {shown}."
        ),
    )


def _table(results: Results, frac: float, chosen: Mapping[str, Point]) -> HtmlTable:
    """Return every policy at one kept fraction by length bucket, each level in a column of its own."""
    levels = [level for level in KEY if level in results.levels]
    labels = ("policy", "length (tokens)", "asked", "kept", "cache, of full")
    return HtmlTable(
        name=f"table-lengths-{100 * frac:.0f}",
        caption=(
            f"By length of text, each policy at its kept fraction nearest {percent(frac)} over all "
            "lengths. Each level: mean over sequences, 95\u00a0% bootstrap interval, number of "
            "sequences; levels may be of different sequences. Left out: sequences in which nothing "
            "was evicted; recall policies, which free nothing, are not here. Kept fraction and mean "
            f"bytes are those of level {levels[0]}"
        ),
        columns=tuple(map(text_column, (*labels, *(_COLUMNS[level] for level in levels)))),
        rows=tuple(_rows(results, chosen, levels)),
    )


def _rows(
    results: Results, chosen: Mapping[str, Point], levels: list[str]
) -> Iterator[tuple[Cell, ...]]:
    """Yield a row a policy and length bucket."""
    titles = titled({name: [point] for name, point in chosen.items()})
    for bucket in results.buckets("kv"):
        held, full = (
            results.at("kv", one, level=levels[0], bucket=bucket)
            for one in ("kv_bytes", "full_kv_bytes")
        )
        losses = {
            level: results.at("kv", KEY[level].column, level=level, bucket=bucket)
            for level in levels
        }
        for name, point in chosen.items():
            here = {level: loss.get(point.cell) for level, loss in losses.items()}
            if not any(here.values()):
                continue
            yield (
                cell(titles[name]),
                cell(bucket),
                cell(percent(point.asked), point.asked),
                *_cache(held.get(point.cell), full.get(point.cell)),
                *(_loss(loss, level) for level, loss in here.items()),
            )


def _cache(held: Point | None, full: Point | None) -> tuple[Cell, Cell]:
    """Return the cells of the kept fraction and of the bytes."""
    if held is None:
        return cell(NOTHING), cell(NOTHING)
    whole = NOTHING if full is None else size(full.mean)
    return cell(percent(held.x), held.x), cell(f"{size(held.mean)} of {whole}", held.mean)


def _loss(point: Point | None, level: str) -> Cell:
    """Return mean, interval and n, and what was left out."""
    text = compact(point, bare if level == ERROR.level else short)
    if point is None:
        return cell(text)
    left_out = f", {point.num_excluded} left out" if point.num_excluded else ""
    return cell(text + left_out, point.mean)


def _by_distance(results: Results, levels: list[str], chosen: Mapping[str, Point]) -> list[Block]:
    """Return how the loss grows after the eviction point, at the deepest level that tells it."""
    rows = distance_rows(results)
    for level in reversed(levels):
        made = distance_curve(rows, KEY[level], chosen, results.run["seed"])
        if made is not None:
            return [
                Heading(text="Does the loss grow after the eviction point?"),
                Text(text=_growth(made)),
                bucket_curve(made, styles(results.families("kv"))),
            ]
    return [
        Absent(
            what="Loss by distance from the eviction point (all texts end within the first bucket)",
            command="tracekit record --max-new-tokens 128 ... -o TRACE",
        )
    ]


def _growth(made: Buckets) -> str:
    """Return for how many policies the loss is larger in the last bucket than in the first."""
    causal = [curve for curve in made.points.values() if curve[0].causal]
    more = sum(curve[-1].mean > curve[0].mean for curve in causal)
    first, last = made.labels[0], made.labels[-1]
    sizes = sample_sizes([point.n for curve in made.points.values() for point in curve])
    return (
        f"Level {made.measure.level}: on the same sequences ({sizes}) the mean loss of {more} of "
        f"{len(causal)} policies is larger in steps {last} than in steps {first}. Policies that "
        "evict at every step go on evicting; the others add entries, so that their kept fraction "
        "rises with the distance."
    )
