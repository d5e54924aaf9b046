"""Held keys packed into cache order: what stands next to what once evicted entries are gone."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

Pool = Literal["avg", "max"]
"""What a neighbourhood of the cache becomes: its mean or its maximum."""


def cache_order(held: torch.Tensor) -> torch.Tensor:
    """Return the positions of held keys, in order, and behind them those of all others.

    Parameters
    ----------
    held
        bool [..., K].

    Returns
    -------
    Tensor
        int64 [..., K].
    """
    return (~held).to(torch.uint8).sort(dim=-1, stable=True).indices


def pooled(score: torch.Tensor, held: torch.Tensor, kernel: int, pool: Pool) -> torch.Tensor:
    """Return each held key's score smoothed over its neighbours in the cache.

    Keys that are not held are moved behind the others, as zeros: the padding at the end.

    Parameters
    ----------
    score
        [X, ..., K], not negative; of any number where no key is held.
    held
        bool, of the same shape.
    kernel
        Width in keys, odd.
    pool
        Mean or maximum; a mean counts the padding, as zeros.

    Returns
    -------
    Tensor
        [X, ..., K]; of no meaning for keys that are not held.
    """
    order = cache_order(held)
    line = score.where(held, 0).gather(-1, order).flatten(0, -2)
    pool1d = functional.avg_pool1d if pool == "avg" else functional.max_pool1d
    line = pool1d(line, kernel, stride=1, padding=kernel // 2)
    return torch.zeros_like(score).scatter_(-1, order, line.reshape(score.shape))
