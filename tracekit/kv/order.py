"""Orders without ties: one int64 an entry, so that any search for the highest gives the same set."""

from __future__ import annotations

import torch

HIGHEST = torch.iinfo(torch.int64).max
"""Above any entry."""

LOWEST = -HIGHEST
"""Below any entry: what is no candidate."""

PLACE_BITS = 28
"""Bits of an order that the place of an entry takes, below its score."""


def level_of(score: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers of 32 bits that order scores as float32 does; -0 and 0 are equal.

    A float32 read as an integer keeps its order once negative numbers are turned around.

    Parameters
    ----------
    score
        float, of any shape; rounded to float32.
    """
    bits = (score.float() + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def order_of(score: torch.Tensor, is_candidate: torch.Tensor) -> torch.Tensor:
    """Return an order of the candidates of each row: score in float32, then place.

    Parameters
    ----------
    score
        [..., X], no NaN where there is a candidate.
    is_candidate
        bool, of a shape that broadcasts with it.

    Returns
    -------
    Tensor
        int64, no two alike in a row; ``LOWEST`` for all others.
    """
    place_X = torch.arange(score.shape[-1], device=score.device)
    return ((level_of(score) << PLACE_BITS) + place_X).where(is_candidate, LOWEST)


def highest(order: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return bool: the ``count`` highest candidates of each row, fewer if it has fewer.

    One search for the largest count serves all N policies that share an order.

    Parameters
    ----------
    order
        int64 [N or 1, L, G, Q, X], or without Q.
    count
        int64 [N, L or 1, G or 1, Q], or without Q; 0 or more.

    Returns
    -------
    Tensor
        bool [N, L, G, Q, X], or without Q; N is that of the order if all counts are 0.
    """
    most = min(int(count.max()), order.shape[-1])
    if most < 1:
        return torch.zeros_like(order, dtype=torch.bool)
    top = order.topk(most, dim=-1).values
    last = (count.clamp(1, most) - 1)[..., None]
    shape = torch.broadcast_shapes(top.shape[:-1], count.shape)
    threshold = top.expand(*shape, -1).gather(-1, last.expand(*shape, 1))
    return (order >= threshold) & (order > LOWEST) & (count > 0)[..., None]
