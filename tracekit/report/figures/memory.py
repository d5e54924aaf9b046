"""Bytes of the cache by tokens and by concurrent requests, in closed form from the model's spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from tracekit.report.figures.canvas import draw, label_ends, styles
from tracekit.report.figures.figure import Drawing
from tracekit.report.formats import count, percent, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from tracekit.report.load import Results

_FRACTIONS = (1.0, 0.5, 0.25, 0.1)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
_DEFAULT_TOKENS = 32_768
"""Longest context drawn for a model whose positions have no end."""


def memory_by_tokens(results: Results) -> Drawing:
    """Return the bytes of one request's cache against its tokens, whole and kept in part."""
    longest, num_bytes = _longest(results), results.run["plan"]["kv_bytes"]
    tokens = np.unique(np.linspace(0, longest, 33).astype(int))
    table = _table("tokens", tokens, [_cache_bytes(results, int(t)) for t in tokens])

    def paint(axes: Axes) -> None:
        axes.set(xlabel="tokens in the cache", ylabel="bytes of the cache, one request")
        axes.set_xlim(0, 1.02 * longest)
        axes.set_ylim(0, 1.05 * table["kv_bytes"].max())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))
        axes.set_yticks(np.arange(0, 1.05, 0.25) * table["kv_bytes"].max())
        _lines(axes, table, "tokens", marks=8)

    full, quarter = table["kv_bytes"].max(), 0.25 * table["kv_bytes"].max()
    return Drawing(
        name="memory-by-tokens",
        svg=draw("memory-by-tokens", paint),
        caption=(
            f"Closed form, not measured: 2 (K and V) x layers x KV heads x head size x tokens x "
            f"{num_bytes} bytes a number, windows of sliding layers included; a kept fraction is "
            "a share of these bytes. Weights, activations and the allocator come on top."
        ),
        alt=(
            f"Cache bytes against tokens: at {count(longest)} tokens the full cache takes "
            f"{size(full)}, a quarter of it {size(quarter)}."
        ),
        table=table,
    )


def memory_by_requests(results: Results) -> Drawing:
    """Return the bytes of 1 to 64 concurrent requests of the longest context."""
    longest = _longest(results)
    one = _cache_bytes(results, longest)
    table = _table("requests", np.array(_REQUESTS), [one * number for number in _REQUESTS])

    def paint(axes: Axes) -> None:
        axes.set(
            xlabel="concurrent requests (log scale)",
            ylabel=f"bytes of the caches, {count(longest)} tokens each",
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(_REQUESTS)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        _lines(axes, table, "requests", marks=1)

    return Drawing(
        name="memory-by-requests",
        svg=draw("memory-by-requests", paint),
        caption=(
            f"Closed form, not measured: the caches of 1 to {_REQUESTS[-1]} requests of "
            f"{count(longest)} tokens each, nothing shared between them. Both axes logarithmic: "
            "a kept fraction moves the line down, it does not bend it."
        ),
        alt=(
            f"Cache bytes against concurrent requests: {_REQUESTS[-1]} requests of "
            f"{count(longest)} tokens take {size(64 * one)} in full, {size(16 * one)} at a quarter."
        ),
        table=table,
    )


def _longest(results: Results) -> int:
    spec = results.spec
    return spec.trained_positions or spec.max_positions or _DEFAULT_TOKENS


def _cache_bytes(results: Results, num_tokens: int) -> int:
    return results.spec.kv_bytes(num_tokens, bytes_per_number=results.run["plan"]["kv_bytes"])


def _table(axis: str, values: NDArray[np.int64], full_bytes: list[int]) -> pd.DataFrame:
    """Return one row a (value of the axis, kept fraction)."""
    grid = pd.DataFrame({axis: values, "full_kv_bytes": full_bytes})
    table = grid.merge(pd.DataFrame({"kept_frac": _FRACTIONS}), how="cross")
    table["kv_bytes"] = table["full_kv_bytes"] * table["kept_frac"]
    return table[[axis, "kept_frac", "kv_bytes"]]


def _lines(axes: Axes, table: pd.DataFrame, axis: str, *, marks: int) -> None:
    names = {frac: "full" if frac == 1 else f"{percent(frac)} kept" for frac in _FRACTIONS}
    looks = styles(names.values())
    ends = {}
    for frac, name in names.items():
        series, style = table[table["kept_frac"] == frac], looks[name]
        axes.plot(
            series[axis],
            series["kv_bytes"],
            color=style.color,
            linestyle=style.dash,
            marker=style.marker,
            markevery=marks,
        )
        ends[name] = (series[axis].iloc[-1], series["kv_bytes"].iloc[-1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: size(y)))
    label_ends(axes, ends, looks)
