"""The shape of attention rows: how concentrated, how local, how lasting, how many keys suffice.

Weights come in blocks of rows, each row a distribution over the keys that it sees: the share that a
sink logit takes is set aside and reported as ``key_mass``. Every number is one a row and query head
(or one a row, of some keys); means over rows and heads are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

from tracekit.measure.attention import as_wide, logits_HQK, visible_QK, weights_HQK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.spec import LayerSpec

MASS_PERCENT = (90, 95, 99)
"""Shares of a row's mass for which the keys are counted, in percent."""

TOP_PERCENT = (1, 5, 10)
"""Shares of the seen keys, rounded up to whole keys, whose largest mass is measured, in percent."""

FIRST_KEYS = (1, 4)
"""First keys of the sequence whose mass is measured."""

NEWEST_KEYS = (1, 32, 128)
"""Newest keys of a row, its own included, whose mass is measured."""

SLACK = 1e-6
"""A mass is reached when less than this is missing: 19 of 20 like keys hold 95 % of the mass."""

BLOCK_BYTES = 8 << 20
"""Attention weights that are in memory at once; larger blocks leave the processor's caches."""


@dataclass(frozen=True)
class Rows:
    """Attention of a block of consecutive queries over consecutive keys.

    Parameters
    ----------
    weights_HQK
        Attention, float32 or float64: each row sums to 1 over the keys that it sees, 0 elsewhere.
    seen_QK
        Which keys each query sees, at least one, bool.
    key_mass_HQ
        Share of the softmax that keys have; 1 unless the layer has sink logits.
    first_query, first_key
        Their positions.
    """

    weights_HQK: torch.Tensor
    seen_QK: torch.Tensor
    key_mass_HQ: torch.Tensor
    first_query: int = 0
    first_key: int = 0

    @property
    def num_seen_Q(self) -> torch.Tensor:
        """Keys that each query sees, int64."""
        return self.seen_QK.sum(-1)

    def between(self, start: int, end: int) -> torch.Tensor:
        """Return the weights [H, Q, end - start] of the keys at these positions, 0 if not given."""
        first, last = self.first_key, self.first_key + self.weights_HQK.shape[-1]
        inside = self.weights_HQK[..., max(0, start - first) : max(0, end - first)]
        before = min(max(0, first - start), end - start)
        return pad(inside, (before, max(0, end - max(last, start))))

    def since(self, query: int) -> Rows:
        """Return the rows from the query at a position on, maybe none."""
        cut = max(0, query - self.first_query)
        return replace(
            self,
            weights_HQK=self.weights_HQK[:, cut:],
            seen_QK=self.seen_QK[cut:],
            key_mass_HQ=self.key_mass_HQ[:, cut:],
            first_query=self.first_query + cut,
        )


def attention_blocks(
    query_HTD: torch.Tensor, key_GTD: torch.Tensor, layer: LayerSpec, first_row: int
) -> Iterator[Rows]:
    """Yield the attention of the rows from ``first_row`` on, in blocks of bounded size.

    Parameters
    ----------
    query_HTD, key_GTD
        Post-RoPE queries and keys of one layer; half precision is read as float32.
    layer
        How it attends.
    first_row
        Position of the first row wanted.
    """
    query_HTD, key_GTD = as_wide(query_HTD), as_wide(key_GTD)
    num_heads, num_rows = query_HTD.shape[:2]
    width = num_rows if layer.window is None else min(num_rows, layer.window)
    size = max(1, BLOCK_BYTES // (num_heads * width * key_GTD.element_size()))
    without_sinks = replace(layer, sinks=None)
    for start in range(first_row, num_rows, size):
        end = min(start + size, num_rows)
        first_key = 0 if layer.window is None else max(0, start - layer.window + 1)
        seen_QK = visible_QK(
            layer,
            end - start,
            end - first_key,
            first_query=start,
            first_key=first_key,
            device=key_GTD.device,
        )
        scores = logits_HQK(query_HTD[:, start:end], key_GTD[:, first_key:end], layer)
        scores = scores.masked_fill_(~seen_QK, -torch.inf)
        weights = weights_HQK(scores, without_sinks)
        key_mass = (
            weights.new_ones(weights.shape[:-1])
            if layer.sinks is None
            else weights_HQK(scores, layer).sum(-1)
        )
        yield Rows(weights, seen_QK, key_mass, start, first_key)


def row_shape(rows: Rows) -> dict[str, torch.Tensor]:
    """Return what describes each row, by name, each [H, Q] float64.

    Returns
    -------
    dict
        The columns of ``schema.ATTENTION_RESULTS`` that are means over rows. ``entropy_frac`` is
        NaN where a row sees one key alone. Gini is that of the seen keys: 0 where all are alike,
        1 - 1 / seen where one has everything.
    """
    weights, num_seen_Q = rows.weights_HQK.double(), rows.num_seen_Q
    entropy_HQ = torch.special.entr(weights).sum(-1)
    columns = {
        "seen_keys": num_seen_Q.double().expand_as(entropy_HQ),
        "key_mass": rows.key_mass_HQ.double(),
        "entropy_nats": entropy_HQ,
        "entropy_frac": entropy_HQ / num_seen_Q.double().log(),
        "effective_keys": weights.sum(-1).square() / weights.square().sum(-1),
    }
    return columns | _concentration(rows) | _places(weights, rows)


def _concentration(rows: Rows) -> dict[str, torch.Tensor]:
    """Return what the sorted weights of each row say."""
    num_seen_Q = rows.num_seen_Q
    # numpy sorts without indices, several times faster than torch sorts with them.
    ascending = torch.from_numpy(np.sort(rows.weights_HQK.cpu().numpy(), axis=-1))
    ascending = ascending.to(rows.weights_HQK.device).double()
    mass_HQK = ascending.flip(-1).cumsum(-1)
    # Integers divide to float32 in torch.
    wide_Q = num_seen_Q.double()
    columns: dict[str, torch.Tensor] = {}
    for percent in MASS_PERCENT:
        count_HQ = 1 + (mass_HQK < percent / 100 - SLACK).sum(-1).double()
        columns |= {f"keys_{percent}": count_HQ, f"keys_{percent}_frac": count_HQ / wide_Q}
    for percent in TOP_PERCENT:
        last_Q1 = (num_seen_Q * percent + 99).div(100, rounding_mode="floor")[:, None] - 1
        at_HQ1 = last_Q1.expand(len(mass_HQK), -1, -1)
        columns[f"top_{percent}_mass"] = mass_HQK.gather(-1, at_HQ1)[..., 0]
    # Unseen keys are the first zeros of the order: ranks count from the first seen key.
    num_keys = ascending.shape[-1]
    place_K = torch.arange(1, num_keys + 1, device=ascending.device, dtype=torch.float64)
    total_HQ = mass_HQK[..., -1]
    rank_sum_HQ = ascending @ place_K - (num_keys - wide_Q) * total_HQ
    gini_HQ = 2 * rank_sum_HQ / (wide_Q * total_HQ) - (wide_Q + 1) / wide_Q
    return columns | {"gini": gini_HQ.clamp_min(0)}


def _places(weights: torch.Tensor, rows: Rows) -> dict[str, torch.Tensor]:
    """Return where the mass of each row lies: at the start, near the query, how far from it."""
    num_queries, num_keys = weights.shape[-2:]
    query_Q1 = torch.arange(num_queries, device=weights.device)[:, None] + rows.first_query
    key_1K = torch.arange(num_keys, device=weights.device)[None] + rows.first_key
    distance_QK = (query_Q1 - key_1K).clamp_min(0)
    columns = {f"first_{n}_mass": rows.between(0, n).double().sum(-1) for n in FIRST_KEYS}
    for n in NEWEST_KEYS:
        columns[f"newest_{n}_mass"] = (weights * (distance_QK < n)).sum(-1)
    return columns | {"mean_distance": (weights * distance_QK).sum(-1)}


def ranks_of(score_K: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers that order scores of at least 0: by float32 score, newer key first.

    Parameters
    ----------
    score_K
        [..., K], K in the order of positions.
    """
    # The bits of non-negative floats grow with them; the position breaks ties.
    bits = score_K.float().contiguous().view(torch.int32).long() << 32
    return bits | torch.arange(score_K.shape[-1], device=score_K.device)


def top_keys(weights_HQK: torch.Tensor, rows: Rows, k: int) -> torch.Tensor:
    """Return the positions of the ``k`` largest seen weights of each row, in no order.

    Parameters
    ----------
    weights_HQK
        The rows' weights, or means of them over heads: [..., Q, K].
    rows
        Gives what is seen and where.
    k
        How many; equal weights (in float32): the newer key.

    Returns
    -------
    Tensor
        int32 [..., Q, k]; -1 where a row sees fewer.
    """
    ranks = ranks_of(weights_HQK).masked_fill(~rows.seen_QK, -1)
    top = ranks.topk(min(k, ranks.shape[-1]), dim=-1, sorted=False).values
    positions = torch.where(top < 0, -1, (top & 0xFFFFFFFF) + rows.first_key)
    return pad(positions.int(), (0, k - positions.shape[-1]), value=-1)


def num_common(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how many keys [...] two lists of distinct keys [..., k] have in common."""
    return sum(
        ((one == other[..., i : i + 1]).sum(-1) for i in range(other.shape[-1])),
        start=torch.zeros((), dtype=torch.int64, device=one.device),
    )


def jaccard(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return common keys over all keys [...], float64, of two lists of k distinct keys [..., k]."""
    common = num_common(one, other).double()
    return common / (2 * one.shape[-1] - common)


def jaccard_with_others(top_NRk: torch.Tensor) -> torch.Tensor:
    """Return the Jaccard overlap [N, R] of each of N >= 2 heads with the others, their mean."""
    num_heads = len(top_NRk)
    overlaps = [jaccard(top_NRk, top_NRk.roll(shift, 0)) for shift in range(1, num_heads)]
    return torch.stack(overlaps).mean(0)


def persistence(top_HRk: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return which part of a row's top keys is still on top some rows later.

    Parameters
    ----------
    top_HRk
        Top keys of R consecutive rows, each with k of them.

    Returns
    -------
    tuple
        Lags 1, 2, 4, ... below R, and the overlap [lags, H], mean over the pairs of rows, float64.
    """
    num_heads, num_rows, k = top_HRk.shape
    lags = [1 << power for power in range(num_rows.bit_length()) if 1 << power < num_rows]
    overlaps = [
        num_common(top_HRk[:, :-lag], top_HRk[:, lag:]).double().mean(-1) / k for lag in lags
    ]
    return lags, torch.stack(overlaps) if lags else top_HRk.new_zeros(0, num_heads).double()


def half_life(lags: Sequence[int], overlap: Sequence[float]) -> float | None:
    """Return the lag at which an overlap first falls to half, straight lines between the lags.

    The overlap at lag 0 is 1. None if it stays above half.
    """
    before, level = 0, 1.0
    for lag, value in zip(lags, overlap, strict=True):
        if value <= 0.5:
            return before + (lag - before) * (level - 0.5) / (level - value)
        before, level = lag, value
    return None


def needed_keys(rows: Rows, order_GP: torch.Tensor, point: int) -> torch.Tensor:
    """Return how many keys of an order each row needs, all keys after the point being kept.

    Parameters
    ----------
    rows
        Rows from the point on.
    order_GP
        The P newest positions before ``point``, best first, for each KV head.
    point
        Tokens seen when the set is chosen.

    Returns
    -------
    Tensor
        int64 [targets, H, Q]: the fewest first keys of the order that hold, with those after the
        point, each share of ``MASS_PERCENT`` of the row's mass. 0 where the newer keys suffice.
    """
    num_heads, num_queries = rows.weights_HQK.shape[:2]
    num_kv_heads, num_old = order_GP.shape
    end = rows.first_key + rows.weights_HQK.shape[-1]
    newer_HQ = rows.between(point, max(point, end)).double().sum(-1)
    old = rows.between(point - num_old, point).reshape(num_kv_heads, -1, num_queries, num_old)
    at = (order_GP - (point - num_old))[:, None, None].expand_as(old)
    ordered = old.gather(-1, at).double().reshape(num_heads, num_queries, num_old)
    mass_HQP = pad(ordered.cumsum(-1), (1, 0)) + newer_HQ[..., None]
    # The last mass is all of it, whatever rounding says.
    counts = [(mass_HQP[..., :-1] < p / 100 - SLACK).sum(-1) for p in MASS_PERCENT]
    return torch.stack(counts)
