"""Attention statistics of one layer of a recorded sequence, as result rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from tracekit import schema
from tracekit.kv.anchors import PromptEnd
from tracekit.kv.schedule import Spans
from tracekit.measure.attention_shape import (
    MASS_PERCENT,
    attention_blocks,
    distance_mass,
    num_distances,
    row_shape,
)
from tracekit.measure.top_keys import (
    half_life,
    jaccard_with_others,
    needed_keys,
    persistence,
    ranks_of,
    top_keys,
)

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec

TOP = schema.TOP_KEYS


@dataclass(frozen=True)
class ScoredSpan:
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
    def of(cls, sequence: pd.Series[Any]) -> ScoredSpan:
        """Return the rows that count: a window of text leaves out what the one before scored."""
        prompt_end = None if pd.isna(sequence["prompt_end"]) else int(sequence["prompt_end"])
        spans = Spans(num_tokens=int(sequence["num_tokens"]), prompt_end=prompt_end)
        point = PromptEnd().find(spans) or 0
        return cls(max(prompt_end or 0, int(sequence["scored_from"]) - 1), point)

    @property
    def later_row(self) -> int:
        """The first row that the oracle's set is judged on."""
        return max(self.first_row, self.point)


@dataclass(frozen=True)
class LayerRows:
    """The result rows of one layer, KV heads first, and the top keys of its mean attention.

    Parameters
    ----------
    index
        Number of the layer.
    rows
        By column, G of the KV heads and one of the layer.
    top_Rk
        int32: positions, of rows that see more keys than are compared.
    """

    index: int
    rows: list[dict[str, Any]]
    top_Rk: torch.Tensor


def measure(
    query: torch.Tensor, key: torch.Tensor, layer: LayerSpec, span: ScoredSpan, row_quantile: float
) -> LayerRows:
    """Measure one layer: two passes over its rows, as the oracle sees all before it chooses.

    Parameters
    ----------
    query, key
        Post-RoPE, [H, T, D] and [G, T, D].
    layer
        How it attends.
    span
        Which rows count; at least one does.
    row_quantile
        Share of the rows whose mass the needed keys keep, in (0, 1].
    """
    shapes: list[dict[str, torch.Tensor]] = []
    tops: list[tuple[torch.Tensor, ...]] = []
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
    num_old = layer.entries(span.point)
    received = torch.zeros(2, num_heads, num_old, dtype=torch.float64)
    num_bins = num_distances(key.shape[-2], layer.window)
    mass_HB = torch.zeros(num_heads, num_bins, dtype=torch.float64)
    for rows in attention_blocks(query, key, layer, span.first_row):
        shapes.append(row_shape(rows))
        mass_HB += distance_mass(rows, num_bins).sum(1)
        mean_GQK = rows.weights_HQK.double().unflatten(0, (num_kv_heads, -1)).mean(1)
        # Rows that see no more keys than are counted agree of necessity.
        counts_Q = rows.num_seen_Q > TOP
        kinds = (rows.weights_HQK, mean_GQK, mean_GQK.mean(0, keepdim=True))
        tops.append(tuple(top_keys(kind, rows, TOP)[:, counts_Q] for kind in kinds))
        old_HQP = rows.since(span.later_row).between(span.point - num_old, span.point).double()
        received += torch.stack((old_HQP.sum(1), old_HQP.square().sum(1)))
    shape = {name: torch.cat([one[name] for one in shapes], 1).numpy() for name in shapes[0]}
    top_HRk, top_GRk, top_1Rk = (torch.cat(kind, 1) for kind in zip(*tops, strict=True))
    columns: dict[str, Any] = {name: by_head(one, layer) for name, one in shape.items()}
    columns["entropy_variance"] = by_head(shape["entropy_nats"].var(1, keepdims=True), layer)
    columns["distance_mass"] = _by_distance(mass_HB / (key.shape[-2] - span.first_row), layer)
    columns |= _agreement(top_HRk, top_GRk, layer)
    columns |= _lasting(top_HRk, layer)
    num_later = key.shape[-2] - span.later_row
    if num_old and num_later > 0:
        mean, square = received.numpy() / num_later
        variance_H1 = (square - mean**2).clip(0).sum(1, keepdims=True)
        columns["row_variance"] = by_head(variance_H1, layer)
        columns |= _needed(query, key, layer, span, received[0], row_quantile)
    found = rows_of(layer, shape["entropy_nats"].shape[1], columns)
    return LayerRows(layer.index, found, top_1Rk[0])


def rows_of(layer: LayerSpec, num_scored: int, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the result rows of one layer, KV heads first; what is not given is null.

    Parameters
    ----------
    layer
        Its number and heads.
    num_scored
        Rows that were measured.
    columns
        By name, G + 1 values: of each KV head, then of the layer.
    """
    nothing = dict.fromkeys(column.name for column in schema.ATTENTION_RESULTS.columns)
    return [
        nothing
        | {"layer": layer.index, "kv_head": kv_head, "num_scored": num_scored}
        | {name: values[at] for name, values in columns.items()}
        for at, kv_head in enumerate([*range(layer.num_kv_heads), schema.ALL])
    ]


def by_head(values_HR: np.ndarray, layer: LayerSpec) -> np.ndarray:
    """Return means over rows and query heads, NaN left out: float64 [G + 1], the layer's last.

    Parameters
    ----------
    values_HR
        float; of any number of rows.
    layer
        Its heads.
    """
    grouped = values_HR.reshape(layer.num_kv_heads, -1)
    # The first row of a text sees one key: its relative entropy is NaN.
    is_there = ~np.isnan(grouped)
    totals, counts = (np.append(one, one.sum()) for one in (np.nansum(grouped, 1), is_there.sum(1)))
    mean = np.full(len(totals), np.nan)
    np.divide(totals, counts, out=mean, where=counts > 0)
    return mean


def _by_distance(mass_HB: torch.Tensor, layer: LayerSpec) -> list[list[float]]:
    """Return the mean mass by distance, a list for each KV head and the layer."""
    bins = [by_head(one[:, None], layer) for one in mass_HB.T.numpy()]
    return [list(map(float, head)) for head in zip(*bins, strict=True)]


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
        columns["group_jaccard"] = by_head(inside.numpy(), layer)
    if layer.num_kv_heads > 1:
        columns["kv_head_jaccard"] = by_head(jaccard_with_others(top_GRk).numpy(), layer)
    return columns


def _lasting(top_HRk: torch.Tensor, layer: LayerSpec) -> dict[str, list[Any]]:
    """Return the overlap of top keys by lag, and the half-lives."""
    lags, overlap_SH = persistence(top_HRk)
    curves = [by_head(one[:, None], layer) for one in overlap_SH.numpy()]
    heads = [list(map(float, curve)) for curve in zip(*curves, strict=True)]
    if not heads:
        return {}
    return {
        "overlap_lags": [lags] * len(heads),
        "overlap": heads,
        "half_life_rows": [half_life(lags, curve) for curve in heads],
    }


def _needed(
    query: torch.Tensor,
    key: torch.Tensor,
    layer: LayerSpec,
    span: ScoredSpan,
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
