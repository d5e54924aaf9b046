"""Tables of what policies hold: by length bucket, recall policies, and every account of each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit.report.blocks import Block, Heading, Text
from tracekit.report.formats import count, number, percent, percent_range, size
from tracekit.report.tables import INTERVAL, Column, HtmlTable, build, text_column
from tracekit.report.verdict.compared import nearest_asked

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.memory.held import Memory

_FRACTIONS = (0.1, 0.25, 0.5)
_AT_ONCE = 8
"""Requests at once in the table by length bucket."""

_SHARES = {
    "kept_end_frac": "end",
    "peak_frac": "peak",
    "padded_frac": "padded",
    "read_frac": "read",
}
_BYTES = {"kv_bytes": "held", "full_kv_bytes": "full", "state_bytes": "state"}
_RECALL = {
    "read_bytes": Column("read a step", size),
    "fetched_bytes": Column("fetched a step", size),
    "hit_frac": Column("hits of the fast tier", percent),
    "transfer_s": Column("transfer a step (s)", number),
}
_BUCKET_COLUMNS = (
    text_column("tokens"),
    text_column("policy"),
    Column("full", size),
    Column("kept", size),
    INTERVAL,
    Column("kept of full", percent),
    Column("n", count),
    Column("left out", count),
)
_ACCOUNTS = (
    "Mean over sequences and scored steps. Kept: bytes held over bytes of the full cache; end: the same at "
    "the last step; read: bytes read a step over those of the full cache. Padded: the longest head times "
    "the heads, which is what a rectangular cache holds. State: what the policy itself must remember. "
    "Flagged: cells that were clipped (budget below what was protected) or clamped (budget above what the "
    "full cache held). Left out: sequences on which nothing was evicted"
)


def buckets(results: Results, memory: Memory) -> list[Block]:
    """Return the bytes of eight requests by length bucket, full and kept, and how they grow."""
    rows, grown = [], dict[str, list[float]]()
    for bucket in results.buckets("kv"):
        held = results.at("kv", "kv_bytes", level=memory.level, bucket=bucket)
        full = results.at("kv", "full_kv_bytes", level=memory.level, bucket=bucket)
        for group in memory.groups:
            cell = group.first.cell
            if cell not in held:
                continue
            point, whole = held[cell], full[cell]
            rows.append(
                [
                    bucket,
                    group.name,
                    _AT_ONCE * whole.mean,
                    _AT_ONCE * point.mean,
                    _size_range(point),
                    point.mean / whole.mean,
                    point.n,
                    point.num_excluded,
                ]
            )
            grown.setdefault(group.name, []).append(point.mean / whole.mean)
    if not rows:
        return []
    caption = (
        f"{_AT_ONCE} requests at once: {_AT_ONCE} x mean bytes of a sequence of the bucket, mean over its scored "
        f"steps, level {memory.level}; intervals over sequences"
    )
    return [
        Heading(text=f"{_AT_ONCE} requests at once, by length"),
        Text(text=_slopes(grown)),
        build("table-memory-buckets", caption, _BUCKET_COLUMNS, rows),
    ]


def _slopes(shares: dict[str, list[float]]) -> str:
    """Return whether memory grows with a flatter slope the longer a text is."""
    told = [
        f"{name} {percent(of[0])} and {percent(of[-1])}"
        for name, of in shares.items()
        if len(of) > 1
    ]
    if not told:
        return "Only one length bucket has sequences: whether the slope grows flatter is not to be seen."
    return f"Held of the full cache in the shortest and in the longest bucket: {'; '.join(told)}."


def _size_range(point: Point) -> str | None:
    if np.isnan(point.low):
        return None
    return f"{size(_AT_ONCE * point.low)} to {size(_AT_ONCE * point.high)}"


def recall(results: Results, level: str) -> list[Block]:
    """Return what recall policies read and fetch; nothing where none was replayed."""
    read = results.at("kv", "read_frac", level=level, x_name="read_frac")
    if not read:
        return []
    found = {one: results.at("kv", one, level=level, x_name="read_frac") for one in _RECALL}
    rows = [
        [point.name, point.mean, percent_range(point.low, point.high), point.n]
        + [found[one][cell].mean if cell in found[one] else None for one in _RECALL]
        for cell, point in read.items()
    ]
    columns = (
        text_column("policy"),
        Column("read fraction", percent),
        INTERVAL,
        Column("n", count),
    )
    caption = (
        f"Recall policies, level {level}: they read less and free nothing but what a slow tier takes; n/a without "
        "a tier or without --bandwidths"
    )
    return [
        Heading(text="Read back when needed"),
        build("table-recall", caption, (*columns, *_RECALL.values()), rows),
    ]


def accounts(results: Results, level: str) -> HtmlTable:
    """Return the measured accounting of each policy at three kept fractions."""
    kept = results.curves("kv", "kept_frac", level=level)
    found = {one: results.at("kv", one, level=level) for one in (*_SHARES, *_BYTES)}
    flagged = _flagged(results, level)
    chosen: dict[tuple[str, str], Point] = {}
    for curve in kept.values():
        for wanted in _FRACTIONS:
            point = nearest_asked(curve, wanted)
            chosen[point.cell] = point
    rows = [
        [point.family if point.causal else f"{point.family} (bound)", point.asked, point.mean]
        + [percent_range(point.low, point.high), point.n]
        + [found[one][cell].mean if cell in found[one] else None for one in found]
        + [flagged.get(point.name, 0), point.num_excluded]
        for cell, point in chosen.items()
    ]
    columns = (
        text_column("policy"),
        Column("asked", percent),
        Column("kept", percent),
        INTERVAL,
        Column("n", count),
        *(Column(label, percent) for label in _SHARES.values()),
        *(Column(label, size) for label in _BYTES.values()),
        Column("flagged", count),
        Column("left out", count),
    )
    return build("table-accounts", f"{_ACCOUNTS}; level {level}", columns, rows)


def _flagged(results: Results, level: str) -> dict[str, int]:
    """Return by policy how many of its sequences were clipped or clamped."""
    rows = results.whole[results.whole["level"] == level]
    marked = rows["is_clipped"].eq(True) | rows["is_clamped"].eq(True)
    return {str(name): int(n) for name, n in marked.groupby(rows["policy"]).sum().items()}
