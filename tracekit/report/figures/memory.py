"""Bytes of the cache by tokens and by requests: the full cache in closed form, policies as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from tracekit.report.figures.canvas import (
    INK,
    REFERENCE,
    Style,
    draw,
    label_ends,
    reference,
    styles,
)
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, percent, sample_sizes, size
from tracekit.report.memory.held import WANTED, measured_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from tracekit.report.load import Results
    from tracekit.report.memory.held import Memory

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
_FULL = "full cache"
_SHORTEST = 64
_FORMULA = (
    "2 (K and V) x layers x KV heads x head size x tokens x bytes a number, windows of sliding "
    "layers included"
)


def memory_by_tokens(results: Results, memory: Memory) -> Drawing:
    """Return the bytes of one request's cache against its tokens, with the measured sequences."""
    names = [group.first.name for group in memory.groups]
    measured = measured_bytes(results, memory.level, names)
    tokens = _powers(min([_SHORTEST, *measured["tokens"]]), memory.longest_tokens)
    table = _by_tokens(memory, tokens, measured)
    looks = _looks(results, memory)

    def paint(axes: Axes) -> None:
        axes.set(xlabel="tokens of a request (log scale)", ylabel="bytes of its cache (log scale)")
        _log_axes(axes, tokens)
        ends = _lines(axes, table[table["source"] != "measured"], "tokens", looks, marked=False)
        ends |= _points(axes, table[table["source"] == "measured"], looks, taken=set(ends))
        label_ends(axes, ends, looks)

    full = memory.full.request_bytes(memory.longest_tokens)
    return Drawing(
        name="memory-by-tokens",
        svg=draw("memory-by-tokens", paint),
        caption=_tokens_caption(memory, measured),
        alt=(
            f"Cache bytes of one request against its tokens: {size(full)} in full at "
            f"{count(memory.longest_tokens)} tokens. {_at_end(memory, memory.longest_tokens)}"
        ),
        table=table,
    )


def memory_by_requests(results: Results, memory: Memory, room_bytes: float | None) -> Drawing:
    """Return the bytes of 1 to 64 requests of the longest context, against the memory left for them.

    Parameters
    ----------
    results, memory
        What is drawn.
    room_bytes
        Memory of the device less the weights; None without a device, drawn if above 0.
    """
    longest = memory.longest_tokens
    one = {_FULL: memory.full.request_bytes(longest)}
    for group in memory.groups:
        one[group.name] = group.request_bytes(memory.full, longest)
    rows = [(name, n, n * held) for name, held in one.items() for n in REQUESTS]
    table = pd.DataFrame(rows, columns=["policy", "requests", "kv_bytes"])
    looks = _looks(results, memory)
    has_limit = room_bytes is not None and room_bytes > 0

    def paint(axes: Axes) -> None:
        axes.set(
            xlabel="requests at once (log scale)",
            ylabel=f"bytes of the caches, {count(longest)} tokens each",
        )
        _log_axes(axes, np.array(REQUESTS))
        ends = _lines(axes, table, "requests", looks, marked=True)
        if has_limit:
            limit = f"room {size(room_bytes or 0)}"
            ends[limit] = reference(axes, room_bytes or 0)
            looks[limit] = REFERENCE
        label_ends(axes, ends, looks)

    return Drawing(
        name="memory-by-requests",
        svg=draw("memory-by-requests", paint),
        caption=_requests_caption(memory, has_limit=has_limit),
        alt=(
            f"Bytes of the caches of 1 to {REQUESTS[-1]} requests: {REQUESTS[-1]} of {count(longest)} tokens "
            f"take {size(REQUESTS[-1] * one[_FULL])} in full."
        ),
        table=table,
    )


def _requests_caption(memory: Memory, *, has_limit: bool) -> str:
    line = " The dashed level is the device's memory less the weights." if has_limit else ""
    return (
        f"Closed form of the full cache times the kept fraction of each policy, measured at level "
        f"{memory.level} near {percent(WANTED)} ({_sizes(memory)}); "
        f"{count(memory.longest_tokens)} tokens a request, nothing shared between requests.{line} A kept fraction moves "
        "a line down and does not bend it. Policies that act once hold this fraction only where prompt and "
        "answer are as long as the recorded ones."
    )


def _by_tokens(memory: Memory, tokens_T: NDArray[np.int64], measured: pd.DataFrame) -> pd.DataFrame:
    """Return one row a point: closed form, kept fraction of it, or measured."""
    full_T = memory.full.bytes_T(tokens_T)
    parts = [_rows(_FULL, "closed form", tokens_T, full_T)]
    for group in memory.groups:
        if group.repeats:
            held_T = group.bytes_T(memory.full, tokens_T)
            parts.append(_rows(group.name, "kept fraction of it", tokens_T, held_T))
        seen = measured[measured["policy"] == group.first.name]
        parts.append(_rows(group.name, "measured", seen["tokens"], seen["kv_bytes"]))
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def _rows(
    name: str,
    source: str,
    tokens_T: NDArray[np.int64] | pd.Series[int],
    bytes_T: NDArray[np.float64] | pd.Series[float],
) -> pd.DataFrame:
    return pd.DataFrame({"policy": name, "source": source, "tokens": tokens_T, "kv_bytes": bytes_T})


def _tokens_caption(memory: Memory, measured: pd.DataFrame) -> str:
    parts = [f"Full cache: closed form, {_FORMULA}."]
    parts.append(
        f"Policies near {percent(WANTED)}, level {memory.level}, {_sizes(memory)}: the most bytes that each "
        f"recorded sequence held ({len(measured)} points); a line is the full cache times the mean kept "
        "fraction, or the token budget."
    )
    if len(measured):
        parts.append(
            f"Beyond {count(measured['tokens'].max())} tokens lines are carried on, not measured."
        )
    once = [name for one in memory.groups if not one.repeats for name in one.families]
    if once:
        parts.append(
            f"Points without a line ({', '.join(once)}) have no fraction that holds at every length: policies "
            "that act once keep all later tokens, transforms keep the newest tokens as they are."
        )
    together = [one for one in memory.groups if len(one.points) > 1]
    parts += [f"{one.name}: {', '.join(one.families)} hold the same." for one in together]
    if memory.left_out:
        parts.append(f"Not drawn: {', '.join(memory.left_out)}.")
    return " ".join(parts)


def _sizes(memory: Memory) -> str:
    sizes = [point.n for group in memory.groups for point in group.points]
    return sample_sizes(sizes) if sizes else "no policy"


def _at_end(memory: Memory, num_tokens: int) -> str:
    told = [
        f"{one.name} holds {size(one.request_bytes(memory.full, num_tokens))}"
        for one in memory.groups
        if one.repeats
    ]
    return f"{'; '.join(told)}." if told else "No policy evicts again and again."


def _looks(results: Results, memory: Memory) -> dict[str, Style]:
    """Return the style of each line: that of its first policy in every figure; the full cache in ink."""
    of_families = styles(results.families("kv"))
    looks = {one.name: of_families[one.first.family] for one in memory.groups}
    return {**looks, _FULL: Style(INK, "-", "")}


def _lines(
    axes: Axes, table: pd.DataFrame, axis: str, looks: dict[str, Style], *, marked: bool
) -> dict[str, tuple[float, float]]:
    """Draw a line a policy; return their ends."""
    ends = {}
    for name, series in table.groupby("policy", sort=False):
        look = looks[str(name)]
        marker = look.marker if marked else ""
        axes.plot(
            series[axis], series["kv_bytes"], color=look.color, linestyle=look.dash, marker=marker
        )
        ends[str(name)] = (float(series[axis].iloc[-1]), float(series["kv_bytes"].iloc[-1]))
    return ends


def _points(
    axes: Axes, table: pd.DataFrame, looks: dict[str, Style], *, taken: set[str]
) -> dict[str, tuple[float, float]]:
    """Draw measured sequences as markers; return the last one of policies without a line."""
    ends = {}
    for name, series in table.groupby("policy", sort=False):
        look = looks[str(name)]
        axes.plot(
            series["tokens"],
            series["kv_bytes"],
            color=look.color,
            linestyle="",
            marker=look.marker,
            fillstyle="none",
        )
        if name not in taken:
            ends[str(name)] = (float(series["tokens"].iloc[-1]), float(series["kv_bytes"].iloc[-1]))
    return ends


def _log_axes(axes: Axes, ticks: NDArray[np.int64]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(ticks[0] / 1.05, ticks[-1] * 1.05)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: size(y)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def _powers(shortest: int, longest: int) -> NDArray[np.int64]:
    """Return powers of two from below the shortest on, and the longest, int64 [T]."""
    low = int(np.log2(max(1, shortest)))
    powers = 2 ** np.arange(low, int(np.log2(longest)) + 1)
    return np.unique([*powers[powers < longest], longest]).astype(np.int64)
