"""Derive attention statistics from queries and keys, in blocks of queries.

No map is ever whole in memory: a block of rows is computed, reduced and dropped. Everything stays
on the layer's device until it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.measure.attention import logits_HQK, visible_QK, weights_HQK
from tracekit.schema import SINK_KEYS, TOP_KEYS, WINDOW_KEYS

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec

BLOCK_BYTES = 2 << 20
"""Size of one block of attention logits: small enough to stay in a cache."""

DEVICE_BLOCK_BYTES = 256 << 20
"""The same on an accelerator, where small blocks are lost in the cost of starting them."""

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

    mass_GK: torch.Tensor
    reads_GK: torch.Tensor
    last_GK: torch.Tensor

    @classmethod
    def empty(cls, num_kv_heads: int, device: torch.device | None = None) -> KeyTotals:
        """Return totals over no keys."""
        zeros = torch.zeros(num_kv_heads, 0, dtype=torch.int64, device=device)
        return cls(zeros.double(), zeros, zeros.clone())

    def grow(self, num_keys: int) -> None:
        """Make room for keys up to ``num_keys``."""
        more = (0, max(0, num_keys - self.mass_GK.shape[1]))
        self.mass_GK = pad(self.mass_GK, more)
        self.reads_GK = pad(self.reads_GK, more)
        self.last_GK = pad(self.last_GK, more, value=-1)

    def add(self, block: _Block) -> None:
        """Add what the keys of a block received; its logits are written over."""
        weights, layer = block.weights, block.layer
        num_queries, num_keys = weights.shape[-2:]
        first = block.first_query + 1
        ordinal_Q1 = torch.arange(first, first + num_queries, device=weights.device)[:, None]
        ordinal_Q1 = ordinal_Q1.to(weights.dtype)
        grouped = (layer.num_kv_heads, layer.group_size, num_keys)
        keys = slice(block.first_key, block.first_key + num_keys)
        self.mass_GK[:, keys] += weights.sum(-2).reshape(grouped).sum(1)
        # In place: new memory for each step of this would cost more than the steps themselves.
        read = torch.mul(weights, ordinal_Q1, out=block.scores).gt_(1)
        self.reads_GK[:, keys] += read.sum(-2).reshape(grouped).sum(1).long()
        last = read.mul_(ordinal_Q1).amax(-2).reshape(grouped).amax(1).long() - 1
        self.last_GK[:, keys] = torch.maximum(self.last_GK[:, keys], last)


@dataclass(frozen=True)
class Wanted:
    """What is kept of attention rows beside their statistics.

    Parameters
    ----------
    top_k
        Largest entries of each row to keep with their keys; 0: none.
    maps
        Layers whose rows are kept whole.
    """

    top_k: int = 0
    maps: frozenset[int] = frozenset()


STATISTICS_ONLY = Wanted()
"""No entries of rows are kept."""


def attention_rows(
    query_HQD: torch.Tensor,
    key_GKD: torch.Tensor,
    layer: LayerSpec,
    totals: KeyTotals,
    *,
    first_query: int,
    first_key: int = 0,
    wanted: Wanted = STATISTICS_ONLY,
) -> dict[str, torch.Tensor]:
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
    wanted
        What else is kept.

    Returns
    -------
    dict
        The statistics columns of ``schema.ATTENTION``, each [H, Q] float32. If wanted, the entries
        of one head's rows one after the other, as many a row as ``num_entries`` says:
        ``top_keys`` int32, ``top_weights`` float32, ``map`` float16, each [H, entries].
    """
    num_queries, num_keys = query_HQD.shape[-2], key_GKD.shape[-2]
    totals.grow(first_key + num_keys)
    limit = BLOCK_BYTES if query_HQD.device.type == "cpu" else DEVICE_BLOCK_BYTES
    size = max(1, limit // (4 * layer.num_heads * num_keys))
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
        block = _Block(
            query_HQD[:, rows],
            key_GKD[:, begin:stop],
            layer,
            first_query=first_query + start,
            first_key=first_key + begin,
        )
        columns = block.statistics()
        if wanted.top_k:
            columns |= block.largest(wanted.top_k)
        if layer.index in wanted.maps:
            columns["map"] = block.whole()
        totals.add(block)
        blocks.append(columns)
    return {name: torch.cat([block[name] for block in blocks], dim=1) for name in blocks[0]}


def num_entries(layer: LayerSpec, first_query: int, num_queries: int) -> list[int]:
    """Return how many keys each of consecutive queries sees."""
    seen = range(first_query + 1, first_query + num_queries + 1)
    return list(seen) if layer.window is None else [min(count, layer.window) for count in seen]


class _Block:
    """Weights and logits [H, Q, K] of a block of rows, unseen keys at 0 and ``_MASKED``."""

    def __init__(
        self,
        query_HQD: torch.Tensor,
        key_GKD: torch.Tensor,
        layer: LayerSpec,
        *,
        first_query: int,
        first_key: int,
    ) -> None:
        self.layer = layer
        self.first_query = first_query
        self.first_key = first_key
        self.scores = logits_HQK(query_HQD, key_GKD, layer)
        self._seen_QK = visible_QK(
            layer,
            *self.scores.shape[-2:],
            first_query=first_query,
            first_key=first_key,
            device=self.scores.device,
        )
        # Without a window only the last columns of a block hold unseen keys.
        edge = 0 if layer.window is not None else max(0, first_query + 1 - first_key)
        self.scores[..., edge:].masked_fill_(~self._seen_QK[:, edge:], _MASKED)
        # No row is blind here, so where no sink takes a share one fused kernel does.
        fused = layer.sinks is None
        self.weights = torch.softmax(self.scores, -1) if fused else weights_HQK(self.scores, layer)

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return the row statistics, each [H, Q]."""
        weights, scores = self.weights, self.scores
        num_queries, num_keys = weights.shape[-2:]
        peak, at = scores.topk(min(TOP_KEYS, num_keys), dim=-1)
        top = weights.gather(-1, at)
        total = weights.sum(-1)
        # ln sum exp over the keys, from the largest logit and its weight; sinks have a share of
        # their own.
        logsumexp = peak[..., 0] - top[..., 0].log() + total.log()
        newest = num_keys - num_queries - WINDOW_KEYS + 1
        columns = {
            "entropy_nats": (logsumexp - torch.linalg.vecdot(weights, scores) / total).clamp_min(0),
            "sink_mass": weights[..., : max(0, SINK_KEYS - self.first_key)].sum(-1),
            "window_mass": _window_mass(weights, newest) if newest > 1 - num_queries else total,
            "top_mass": top.sum(-1),
            "effective_keys": (total / torch.linalg.vector_norm(weights, dim=-1)) ** 2,
        }
        return {name: column.float() for name, column in columns.items()}

    def largest(self, top_k: int) -> dict[str, torch.Tensor]:
        """Return the largest entries of each row: keys, weights, and the mass of all others."""
        # By logits: a seen key whose weight is rounded to 0 goes before one that is not seen.
        at = self.scores.topk(min(top_k, self.scores.shape[-1]), dim=-1).indices
        top = self.weights.gather(-1, at)
        counts = num_entries(self.layer, self.first_query, self.scores.shape[-2])
        kept = [min(top_k, count) for count in counts]
        kept_Q1 = torch.tensor(kept, device=at.device)[:, None]
        kept_HQK = (torch.arange(at.shape[-1], device=at.device) < kept_Q1).expand_as(at)
        num_heads = at.shape[0]
        rest = self.weights.sum(-1) - (top * kept_HQK).sum(-1)
        return {
            "top_keys": (at + self.first_key)[kept_HQK].view(num_heads, -1).int(),
            "top_weights": top[kept_HQK].view(num_heads, -1).float(),
            "rest_mass": rest.clamp_min(0).float(),
        }

    def whole(self) -> torch.Tensor:
        """Return the rows' seen entries, one row after the other, float16 [H, entries]."""
        seen_HQK = self._seen_QK.expand_as(self.weights)
        return self.weights.half()[seen_HQK].view(self.weights.shape[0], -1)


def _window_mass(weights: torch.Tensor, newest: int) -> torch.Tensor:
    """Return the mass [H, Q] on the newest keys, the first row's from column ``newest`` on."""
    start = max(0, newest)
    return weights[..., start:].triu(newest - start).sum(-1)
