"""Attention statistics of a recorded sequence, and the kept fraction that they suggest by layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from tracekit import schema
from tracekit.errors import TraceError, UsageError
from tracekit.kv.schedule import PromptEnd, Spans
from tracekit.measure.attention_shape import (
    MASS_PERCENT,
    attention_blocks,
    half_life,
    jaccard,
    jaccard_with_others,
    needed_keys,
    persistence,
    ranks_of,
    row_shape,
    top_keys,
)
from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.measure.tensors import to_torch
from tracekit.simulate.kv import length_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from tracekit.spec import LayerSpec
    from tracekit.trace.reader import Trace

ROW_QUANTILE = 0.9
"""Share of the rows, and of the sequences, whose attention a recommended fraction keeps."""

RESAMPLES = 1000
"""Draws of the bootstrap."""

TOP = schema.TOP_KEYS


@dataclass(frozen=True)
class _Span:
    """Which rows of a sequence count.

    Parameters
    ----------
    first_row
        The first row measured: after the prompt; in plain text the first that counts here.
    point
        Tokens seen when the oracle chooses: the prompt; in plain text half of the length.
    """

    first_row: int
    point: int

    @classmethod
    def of(cls, sequence: pd.Series[Any]) -> _Span:
        """Return the rows that count: a window of text leaves out what the one before scored."""
        prompt_end = None if pd.isna(sequence["prompt_end"]) else int(sequence["prompt_end"])
        spans = Spans(num_tokens=int(sequence["num_tokens"]), prompt_end=prompt_end)
        point = PromptEnd().find(spans) or 0
        return cls(max(prompt_end or 0, int(sequence["scored_from"]) - 1), point)

    @property
    def later_row(self) -> int:
        """The first row that the oracle's set is judged on."""
        return max(self.first_row, self.point)


def attention_rows(
    trace: Trace, sequence: pd.Series[Any], *, row_quantile: float = ROW_QUANTILE
) -> pa.Table:
    """Return the rows of ``schema.ATTENTION_RESULTS`` on one sequence.

    Parameters
    ----------
    trace
        Recorded with queries and keys; from a trace without them come the few numbers that its
        table of attention rows holds, all others are null.
    sequence
        Its row of ``trace.sequences``.
    row_quantile
        Share of the rows whose mass the needed keys keep, in (0, 1].

    Returns
    -------
    Table
        A row for each KV head and each layer that holds keys of its own; none where no row counts.

    Raises
    ------
    TraceError
        If the trace holds no attention at all.
    UsageError
        If the quantile is out of range.
    """
    if not 0 < row_quantile <= 1:
        msg = f"row quantile {row_quantile:g} is out of range: give one above 0 and up to 1."
        raise UsageError(msg)
    if trace.capture == "steps":
        msg = (
            f"attention statistics need attention: {trace.path} was recorded with --capture steps, "
            "record it with --capture hidden or qkv."
        )
        raise TraceError(msg)
    name, span = str(sequence["sequence_id"]), _Span.of(sequence)
    stored = set(trace.stored_layers(name))
    layers = [one for one in trace.spec.layers if one.holds_keys and not one.refusal]
    whole = [one for one in layers if one.index in stored]
    parts = _measured(trace, name, whole, span, row_quantile)
    if rest := [one for one in layers if one.index not in stored]:
        parts += _recorded(trace, name, rest, span)
    rows = [row for part in parts for row in part]
    shared = {
        "sequence_id": name,
        "domain": sequence["domain"],
        "bucket": length_bucket(int(sequence["num_tokens"])),
        "level": "local",
        "first_row": span.first_row,
    }
    columns = {key: [row.get(key) for row in rows] for key in (rows[0] if rows else ())}
    return schema.ATTENTION_RESULTS.build(len(rows), columns | shared)


def _measured(
    trace: Trace, name: str, layers: list[LayerSpec], span: _Span, row_quantile: float
) -> list[list[dict[str, Any]]]:
    """Return, by layer, the rows that queries and keys give, read one layer at a time."""
    measured: list[_Layer] = []
    for layer in layers:
        blocks = trace.attention_inputs(name, layer.index)
        query, key = (to_torch(blocks[kind].data, blocks[kind].dtype) for kind in ("query", "key"))
        if span.first_row < key.shape[-2]:
            measured.append(_measure(query, key, layer, span, row_quantile))
    _compare_with_next(measured)
    return [one.rows for one in measured]


@dataclass(frozen=True)
class _Layer:
    """The result rows of one layer, KV heads first, and the top keys of its mean attention."""

    index: int
    rows: list[dict[str, Any]]
    top_Rk: torch.Tensor


def _measure(
    query: torch.Tensor, key: torch.Tensor, layer: LayerSpec, span: _Span, row_quantile: float
) -> _Layer:
    """Measure one layer: two passes over its rows, as the oracle sees all before it chooses."""
    shapes: list[dict[str, torch.Tensor]] = []
    tops: list[tuple[torch.Tensor, ...]] = []
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
    num_old = layer.entries(span.point)
    received = torch.zeros(2, num_heads, num_old, dtype=torch.float64)
    for rows in attention_blocks(query, key, layer, span.first_row):
        shapes.append(row_shape(rows))
        mean_GQK = rows.weights_HQK.double().unflatten(0, (num_kv_heads, -1)).mean(1)
        # Rows that see no more keys than are counted agree of necessity.
        counts_Q = rows.num_seen_Q > TOP
        kinds = (rows.weights_HQK, mean_GQK, mean_GQK.mean(0, keepdim=True))
        tops.append(tuple(top_keys(kind, rows, TOP)[:, counts_Q] for kind in kinds))
        old_HQP = rows.since(span.later_row).between(span.point - num_old, span.point).double()
        received += torch.stack((old_HQP.sum(1), old_HQP.square().sum(1)))
    shape = {name: torch.cat([one[name] for one in shapes], 1).numpy() for name in shapes[0]}
    top_HRk, top_GRk, top_1Rk = (torch.cat(kind, 1) for kind in zip(*tops, strict=True))
    columns: dict[str, Any] = {name: _by_head(one, layer) for name, one in shape.items()}
    columns["entropy_variance"] = _by_head(shape["entropy_nats"].var(1, keepdims=True), layer)
    columns |= _agreement(top_HRk, top_GRk, layer)
    columns |= _lasting(top_HRk, layer)
    num_later = key.shape[-2] - span.later_row
    if num_old and num_later > 0:
        mean, square = received.numpy() / num_later
        variance_H1 = (square - mean**2).clip(0).sum(1, keepdims=True)
        columns["row_variance"] = _by_head(variance_H1, layer)
        columns |= _needed(query, key, layer, span, received[0], row_quantile)
    found = _rows_of(layer, shape["entropy_nats"].shape[1], columns)
    return _Layer(layer.index, found, top_1Rk[0])


def _rows_of(layer: LayerSpec, num_scored: int, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the result rows of one layer from columns of G + 1 values; what is not given is null."""
    nothing = dict.fromkeys(column.name for column in schema.ATTENTION_RESULTS.columns)
    return [
        nothing
        | {"layer": layer.index, "kv_head": kv_head, "num_scored": num_scored}
        | {name: values[at] for name, values in columns.items()}
        for at, kv_head in enumerate([*range(layer.num_kv_heads), schema.ALL])
    ]


def _by_head(values_HR: np.ndarray, layer: LayerSpec) -> np.ndarray:
    """Return means over rows and query heads [G + 1]: each KV head's, then the layer's."""
    grouped = values_HR.reshape(layer.num_kv_heads, -1)
    # The first row of a text sees one key: its relative entropy is NaN.
    is_there = ~np.isnan(grouped)
    totals, counts = (np.append(one, one.sum()) for one in (np.nansum(grouped, 1), is_there.sum(1)))
    mean = np.full(len(totals), np.nan)
    np.divide(totals, counts, out=mean, where=counts > 0)
    return mean


def _agreement(
    top_HRk: torch.Tensor, top_GRk: torch.Tensor, layer: LayerSpec
) -> dict[str, np.ndarray]:
    """Return the Jaccard overlaps of top keys inside each group and between KV heads."""
    columns: dict[str, np.ndarray] = {}
    if not top_HRk.shape[1]:
        return columns
    if layer.group_size > 1:
        groups = top_HRk.unflatten(0, (layer.num_kv_heads, -1))
        inside = torch.cat([jaccard_with_others(group) for group in groups])
        columns["group_jaccard"] = _by_head(inside.numpy(), layer)
    if layer.num_kv_heads > 1:
        columns["kv_head_jaccard"] = _by_head(jaccard_with_others(top_GRk).numpy(), layer)
    return columns


def _lasting(top_HRk: torch.Tensor, layer: LayerSpec) -> dict[str, list[Any]]:
    """Return the overlap of top keys by lag, and the half-lives."""
    lags, overlap_SH = persistence(top_HRk)
    curves = [_by_head(one[:, None], layer) for one in overlap_SH.numpy()]
    by_head = [list(map(float, curve)) for curve in zip(*curves, strict=True)]
    if not by_head:
        return {}
    return {
        "overlap_lags": [lags] * len(by_head),
        "overlap": by_head,
        "half_life_rows": [half_life(lags, curve) for curve in by_head],
    }


def _needed(
    query: torch.Tensor,
    key: torch.Tensor,
    layer: LayerSpec,
    span: _Span,
    received_HP: torch.Tensor,
    row_quantile: float,
) -> dict[str, np.ndarray]:
    """Return what part of the keys seen at the point must stay, with and without protection.

    The oracle's set is chosen once, for the group's heads together, by the attention that keys will
    receive: a strong reference (H2O's rule with knowledge of the future), not a proven optimum.
    """
    num_old, num_kv_heads = received_HP.shape[-1], layer.num_kv_heads
    first = span.point - num_old
    received_GP = received_HP.unflatten(0, (num_kv_heads, -1)).sum(1)
    position_P = torch.arange(first, span.point)
    protected_P = position_P < schema.SINK_KEYS
    protected_P |= position_P >= span.point - schema.PROTECTED_RECENT
    floors = {"oracle": 0, "needed": int(protected_P.sum())}
    scores = {"oracle": received_GP, "needed": received_GP.masked_fill(protected_P, torch.inf)}
    orders = {
        name: ranks_of(one).argsort(-1, descending=True) + first for name, one in scores.items()
    }
    counts: dict[str, list[torch.Tensor]] = {name: [] for name in orders}
    for rows in attention_blocks(query, key, layer, span.later_row):
        for name, order in orders.items():
            counts[name].append(needed_keys(rows, order, span.point).clamp_min(floors[name]))
    point = np.full(num_kv_heads + 1, span.point)
    columns = {"point": point, "point_keys": np.full_like(point, num_old)}
    columns["row_quantile"] = np.full(num_kv_heads + 1, row_quantile)
    for name, blocks in counts.items():
        for percent, count_HR in zip(MASS_PERCENT, torch.cat(blocks, -1).numpy(), strict=True):
            heads = [*count_HR.reshape(num_kv_heads, -1), count_HR]
            number = [np.quantile(one, row_quantile, method="inverted_cdf") for one in heads]
            columns[f"{name}_frac_{percent}"] = np.array(number) / num_old
    return columns


def _compare_with_next(measured: list[_Layer]) -> None:
    """Fill in the overlap of each layer's top keys with those of the layer above it."""
    for one, above in pairwise(measured):
        # A layer whose window holds no more keys than are compared has no rows at all.
        if above.index == one.index + 1 and len(one.top_Rk) and len(above.top_Rk):
            overlap = jaccard(one.top_Rk, above.top_Rk)
            one.rows[-1]["next_layer_jaccard"] = float(overlap.mean())


def _recorded(
    trace: Trace, name: str, layers: list[LayerSpec], span: _Span
) -> Iterator[list[dict[str, Any]]]:
    """Yield, by layer, the rows that recorded statistics give: the shape alone."""
    columns_read = ("layer", "head", "query", "entropy_nats", "effective_keys", "sink_mass")
    frame = trace.table("attention", sequence_id=name, columns=columns_read)
    frame = frame[frame["query"] >= span.first_row]
    for layer in layers:
        part = frame[frame["layer"] == layer.index].sort_values(["head", "query"])
        if part.empty:
            continue
        values_HR: dict[str, np.ndarray] = {
            name: part[name].to_numpy(np.float64).reshape(layer.num_heads, -1)
            for name in ("entropy_nats", "effective_keys", "sink_mass", "query")
        }
        sink_HR = values_HR.pop("sink_mass")
        query_HR, entropy_HR = values_HR.pop("query"), values_HR["entropy_nats"]
        seen_HR = np.minimum(query_HR + 1, layer.window or np.inf)
        with np.errstate(invalid="ignore"):
            values_HR |= {"seen_keys": seen_HR, "entropy_frac": entropy_HR / np.log(seen_HR)}
        values_HR["entropy_variance"] = entropy_HR.var(1, keepdims=True)
        # Recorded masses are shares of a softmax in which sink logits have a part.
        if layer.sinks is None:
            values_HR["first_4_mass"] = sink_HR
        columns = {name: _by_head(values, layer) for name, values in values_HR.items()}
        yield _rows_of(layer, entropy_HR.shape[1], columns)


EVIDENCE = (
    "entropy_frac",
    "effective_keys",
    "keys_95_frac",
    "first_4_mass",
    "newest_32_mass",
    "half_life_rows",
    "kv_head_jaccard",
    "next_layer_jaccard",
)
"""Statistics of a layer that stand beside its recommended fraction, as means over sequences."""


def recommend(rows: pd.DataFrame, *, seed: int, mass_percent: int = 95) -> dict[str, Any]:
    """Return the columns of ``schema.RECOMMENDED``: a kept fraction for each layer.

    An estimate from attention mass alone, each layer's inputs unchanged (level local): what an
    oracle would need, with the first and the newest keys protected. It is no guarantee: values,
    later layers and policies that do not know the future are not in it.

    Parameters
    ----------
    rows
        Of ``schema.ATTENTION_RESULTS``, any number of sequences.
    seed
        Of the bootstrap; sequences are resampled, not rows.
    mass_percent
        Attention mass of each later row to be kept: one of ``MASS_PERCENT``.

    Returns
    -------
    dict
        ``kept_frac`` is the quantile over sequences, at the quantile that was used over rows, of
        what a layer needs; layers without queries and keys in the trace are left out.

    Raises
    ------
    UsageError
        If there is no such mass, or the rows were measured at several quantiles.
    """
    if mass_percent not in MASS_PERCENT:
        msg = f"no keys were counted for {mass_percent} % of the mass: choose from {MASS_PERCENT}."
        raise UsageError(msg)
    known = rows[rows[f"needed_frac_{mass_percent}"].notna()]
    quantiles = known["row_quantile"].unique()
    if len(quantiles) > 1:
        msg = f"rows measured at quantiles {sorted(map(float, quantiles))}: measure all at one."
        raise UsageError(msg)
    found = [
        _recommended(cells, mass_percent, seed) | {"layer": layer, "level": "local"}
        for layer, cells in known.groupby("layer", sort=True)
    ]
    return {one.name: [row[one.name] for row in found] for one in schema.RECOMMENDED.columns}


def _recommended(cells: pd.DataFrame, mass_percent: int, seed: int) -> dict[str, Any]:
    """Return the recommended fraction of one layer and what it stands on."""
    column, quantile = f"needed_frac_{mass_percent}", float(cells["row_quantile"].iloc[0])
    layer, heads = cells[cells["kv_head"] == schema.ALL], cells[cells["kv_head"] >= 0]
    of_heads = heads.groupby("sequence_id", observed=True)[column]
    return (
        _quantile_of(layer[column].to_numpy(np.float64), quantile, seed)
        | {
            "mass_frac": mass_percent / 100,
            "quantile": quantile,
            "num_scored": int(layer["num_scored"].sum()),
            "point_keys": float(layer["point_keys"].mean()),
            "mean_frac": float(layer[column].mean()),
            "oracle_frac": float(layer[f"oracle_frac_{mass_percent}"].mean()),
            "head_mean_frac": float(of_heads.mean().mean()),
            "head_max_frac": float(of_heads.max().mean()),
        }
        | {name: float(layer[name].mean()) for name in EVIDENCE}
    )


def _quantile_of(values_S: np.ndarray, quantile: float, seed: int) -> dict[str, Any]:
    """Return a quantile over sequences with its 95 % percentile bootstrap interval."""
    n = len(values_S)
    value = float(np.quantile(values_S, quantile, method="inverted_cdf"))
    if n < MIN_SEQUENCES:
        return {"kept_frac": value, "low": None, "high": None, "n": n}
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    draws = np.quantile(values_S[drawn], quantile, axis=1, method="inverted_cdf")
    low, high = np.quantile(draws, (0.025, 0.975), method="inverted_cdf")
    return {"kept_frac": value, "low": float(low), "high": float(high), "n": n}
