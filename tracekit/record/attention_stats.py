"""Derive attention statistics from queries and keys, in blocks of queries.

No map is ever whole in memory: a block of rows is computed, reduced and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tracekit.measure.attention import logits_HQK, weights_HQK
from tracekit.schema import SINK_KEYS, TOP_KEYS, WINDOW_KEYS

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec

BLOCK_BYTES = 4 << 20
"""Size of one block of attention logits: small enough to stay in a cache."""

_MASKED = -1e30
"""Logit of a key that is not seen: its weight is exactly 0, and 0 times it is 0, not NaN."""


@dataclass
class KeyTotals:
    """What each key of one layer has received so far.

    Parameters
    ----------
    mass_GK
        Attention received, summed over rows and the group's query heads, float64.
    reads_GK
        Rows of the group's heads that read it with more than 1 / (t + 1), int64.
    last_GK
        Position of the last such row, -1 if none, int64.
    """

    mass_GK: np.ndarray
    reads_GK: np.ndarray
    last_GK: np.ndarray

    @classmethod
    def empty(cls, num_kv_heads: int) -> KeyTotals:
        """Return totals over no keys."""
        shape = (num_kv_heads, 0)
        return cls(np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def grow(self, num_keys: int) -> None:
        """Make room for keys up to ``num_keys``."""
        more = ((0, 0), (0, max(0, num_keys - self.mass_GK.shape[1])))
        self.mass_GK = np.pad(self.mass_GK, more)
        self.reads_GK = np.pad(self.reads_GK, more)
        self.last_GK = np.pad(self.last_GK, more, constant_values=-1)


def attention_rows(
    query_HQD: torch.Tensor,
    key_GKD: torch.Tensor,
    layer: LayerSpec,
    totals: KeyTotals,
    *,
    first_query: int,
    first_key: int = 0,
) -> dict[str, np.ndarray]:
    """Return the statistics of attention rows, and add what keys received to ``totals``.

    Parameters
    ----------
    query_HQD
        Queries of consecutive positions.
    key_GKD
        All keys that these rows may see, the last one at the last query's position.
    layer
        How this layer attends.
    totals
        Of this layer; changed in place.
    first_query, first_key
        Positions of the first query and the first key given.

    Returns
    -------
    dict
        The statistics columns of ``schema.ATTENTION``, each [H, Q] float32.
    """
    num_queries, num_keys = query_HQD.shape[-2], key_GKD.shape[-2]
    totals.grow(first_key + num_keys)
    size = max(1, BLOCK_BYTES // (4 * layer.num_heads * num_keys))
    blocks = []
    for start in range(0, num_queries, size):
        rows = slice(start, min(start + size, num_queries))
        # Keys after the block's last query, and before its first one's window, are never seen.
        stop = first_query + rows.stop - first_key
        begin = (
            0
            if layer.window is None
            else max(0, first_query + start - layer.window + 1 - first_key)
        )
        weights, scores = _masked_weights(
            query_HQD[:, rows],
            key_GKD[:, begin:stop],
            layer,
            first_query=first_query + start,
            first_key=first_key + begin,
        )
        _add(totals, weights, layer, first_query + start, first_key + begin)
        blocks.append(_reduce(weights, scores, first_key + begin))
    return {name: np.concatenate([block[name] for block in blocks], axis=1) for name in blocks[0]}


def _masked_weights(
    query_HQD: torch.Tensor,
    key_GKD: torch.Tensor,
    layer: LayerSpec,
    *,
    first_query: int,
    first_key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and logits [H, Q, K], unseen keys at 0 and ``_MASKED``."""
    scores = logits_HQK(query_HQD, key_GKD, layer)
    query_Q1 = torch.arange(first_query, first_query + query_HQD.shape[-2])[:, None]
    key_1K = torch.arange(first_key, first_key + key_GKD.shape[-2])[None]
    hidden_QK = key_1K > query_Q1
    if layer.window is not None:
        hidden_QK |= key_1K <= query_Q1 - layer.window
    hidden_QK = hidden_QK.to(scores.device)
    # Without a window only the last columns of a block hold unseen keys.
    edge = 0 if layer.window is not None else max(0, first_query + 1 - first_key)
    scores[..., edge:].masked_fill_(hidden_QK[:, edge:], _MASKED)
    return weights_HQK(scores, layer), scores


def _reduce(weights: torch.Tensor, scores: torch.Tensor, first_key: int) -> dict[str, np.ndarray]:
    """Return the row statistics [H, Q] of one block."""
    num_queries, num_keys = weights.shape[-2:]
    top = weights.topk(min(TOP_KEYS, num_keys), dim=-1).values
    total = weights.sum(-1)
    # ln sum exp over the keys, from the largest logit and its weight; sinks have a share of their own.
    logsumexp = scores.amax(-1) - top[..., 0].log() + total.log()
    newest = num_keys - num_queries - WINDOW_KEYS + 1
    columns = {
        "entropy_nats": (logsumexp - (weights * scores).sum(-1) / total).clamp_min(0),
        "sink_mass": weights[..., : max(0, SINK_KEYS - first_key)].sum(-1),
        "window_mass": weights.triu(newest).sum(-1) if newest > 1 - num_queries else total,
        "top_mass": top.sum(-1),
        "effective_keys": (total / torch.linalg.vector_norm(weights, dim=-1)) ** 2,
    }
    return {name: column.float().cpu().numpy() for name, column in columns.items()}


def _add(
    totals: KeyTotals, weights: torch.Tensor, layer: LayerSpec, first_query: int, first_key: int
) -> None:
    """Add one block's columns to the totals of its keys."""
    num_queries, num_keys = weights.shape[-2:]
    position_Q1 = torch.arange(
        first_query, first_query + num_queries, device=weights.device, dtype=torch.float32
    )[:, None]
    read = (weights * (position_Q1 + 1) > 1).float()
    last = (read * (position_Q1 + 1)).amax(-2) - 1
    grouped = (layer.num_kv_heads, layer.group_size, num_keys)
    keys = slice(first_key, first_key + num_keys)
    totals.mass_GK[:, keys] += weights.sum(-2).reshape(grouped).sum(1).cpu().numpy()
    totals.reads_GK[:, keys] += read.sum(-2).reshape(grouped).sum(1).cpu().numpy().astype(np.int64)
    latest = last.reshape(grouped).amax(1).cpu().numpy().astype(np.int64)
    totals.last_GK[:, keys] = np.maximum(totals.last_GK[:, keys], latest)
