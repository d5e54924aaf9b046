"""Keys that their neighbours on both sides attend to stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from tracekit.errors import UsageError
from tracekit.kv.attend import row_blocks
from tracekit.kv.packed import cache_order
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View

POOLED = 3
"""Neighbours in the cache whose scores are averaged, the key itself among them."""


@SCORERS.register("non_causal")
@dataclass(frozen=True)
class NonCausal(Scorer):
    """Score = attention without causal mask inside a chunk, times the L2 norm of the value.

    Serves ``noncausal`` (Compactor, Chari and Van Durme 2025, arXiv:2507.08143, its second half).
    Held keys and the queries of the same tokens, post-RoPE, are cut into chunks in cache order;
    in a chunk every query attends to every key. A key's score is the sum over queries, the mean
    over the group, times the norm, averaged over 3 neighbours in the cache with zeros at the ends.
    As in kvpress the softmax is that of q k, without scale, soft-cap or sink logits.

    Differences from kvpress: the last chunk may be shorter and is attention among its own tokens,
    where kvpress fills it up with zeros that take part; no z-score over heads, which changes no
    order within a head. A cache that decides again must keep the queries of its tokens beside them,
    which is not in ``state_bytes``.

    Parameters
    ----------
    chunk
        Tokens of a chunk.
    """

    chunk: int = 256

    presets: ClassVar = (Preset(name="noncausal"),)

    def __post_init__(self) -> None:
        if self.chunk < 1:
            msg = f"chunk={self.chunk} is a number of tokens, at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """All three."""
        return Needs(keys=True, values=True, queries=True)

    def score(self, view: View) -> torch.Tensor:
        """Return pooled scores, [N, L, G, K]."""
        return self.among(view, view.held_NLGK)

    def among(self, view: View, counted_NLGK: torch.Tensor) -> torch.Tensor:
        """Return scores among some of the keys, [N, L, G, K]; 0 for all others."""
        norm_LGK = view.value_LGKD.norm(dim=-1)
        scores = [
            self._scores(view.query_LHKD[at], view.key_LGKD[at], norm_LGK[at], counted_GK)
            for counted_LGK in counted_NLGK
            for at, counted_GK in enumerate(counted_LGK)
        ]
        score_NLGK: torch.Tensor = torch.stack(scores).unflatten(0, counted_NLGK.shape[:2])
        return score_NLGK

    def _scores(
        self,
        query_HKD: torch.Tensor,
        key_GKD: torch.Tensor,
        norm_GK: torch.Tensor,
        counted_GK: torch.Tensor,
    ) -> torch.Tensor:
        """Return the scores [G, K] of one layer and kept set."""
        score_GK = torch.zeros_like(norm_GK)
        count_G1 = counted_GK.sum(-1, keepdim=True)
        size = min(self.chunk, int(count_G1.max()))
        if not size:
            return score_GK
        num_slots = -(-int(count_G1.max()) // size) * size
        order_GX = cache_order(counted_GK)[:, :num_slots]
        order_GX = functional.pad(order_GX, (0, num_slots - order_GX.shape[-1]))
        is_full_GX = torch.arange(num_slots, device=order_GX.device) < count_G1
        received_GX = _received(query_HKD, key_GKD, order_GX, is_full_GX, size)
        line_GX = received_GX * norm_GK.gather(-1, order_GX)
        line_GX = functional.avg_pool1d(line_GX, POOLED, stride=1, padding=POOLED // 2)
        return score_GK.scatter_add_(-1, order_GX, line_GX.where(is_full_GX, 0))


def _received(
    query_HKD: torch.Tensor,
    key_GKD: torch.Tensor,
    order_GX: torch.Tensor,
    is_full_GX: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """Return what the key in each slot receives inside its chunk, mean over the group: [G, X]."""
    groups = (len(key_GKD), -1)
    query_GMKD, index_GX1 = query_HKD.unflatten(0, groups), order_GX[..., None]
    parts = []
    row_bytes = len(query_HKD) * size * query_HKD.element_size()
    for start, end in row_blocks(0, order_GX.shape[-1] // size, row_bytes * size):
        slots = slice(start * size, end * size)
        index_GXD = index_GX1[:, slots].expand(-1, -1, key_GKD.shape[-1])
        index_GMXD = index_GXD[:, None].expand(-1, query_GMKD.shape[1], -1, -1)
        key_GPSD = key_GKD.gather(1, index_GXD).unflatten(1, (-1, size))
        query_GMPSD = query_GMKD.gather(2, index_GMXD).unflatten(2, (-1, size))
        is_full_GPS = is_full_GX[:, slots].unflatten(1, (-1, size))
        logits_GMPQS = query_GMPSD @ key_GPSD[:, None].mT
        logits_GMPQS.masked_fill_(~is_full_GPS[:, None, :, None], -torch.inf)
        weights_GMPQS = logits_GMPQS.softmax(-1).where(is_full_GPS[:, None, ..., None], 0)
        parts.append(weights_GMPQS.sum(-2).mean(1).flatten(1))
    return torch.cat(parts, dim=-1)
