"""The keys that matter most to attention rows: how alike, how lasting, how many suffice.

Lists of top keys are compared between heads and between rows; a set that is chosen once is judged
by how much of it each later row needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.measure.attention_shape import MASS_PERCENT, SLACK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.attention_shape import Rows


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
