"""Entries of each layer and head at every decision: shares of a plan, turned into whole entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tracekit.kv.fill import fill, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.amounts import Amount
    from tracekit.kv.budget import Cache


class Entitlement(Protocol):
    """Says how many entries each head may keep at a decision."""

    def entries(self, num_tokens: int, layers: Sequence[int]) -> torch.Tensor:
        """Return int64 [N, L, G] for the layers of an engine."""


class Allotment:
    """The entries of each layer and head at every decision of N policies, frozen shares and all.

    Parameters
    ----------
    cache
        All layers.
    kept
        N kept amounts.
    shares
        For each of the N, by layer, what ``LayerBudget.plan`` gave; None: the same for all.
    """

    def __init__(
        self,
        cache: Cache,
        kept: Sequence[Amount],
        shares: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self._cache, self._kept, self._shares = cache, tuple(kept), shares
        self._place_of = {one.index: place for place, one in enumerate(cache.layers)}

    def entries(self, num_tokens: int, layers: Sequence[int]) -> torch.Tensor:
        """Return the entries that layers of one shape may keep, int64 [N, L, G].

        Parameters
        ----------
        num_tokens
            Tokens seen.
        layers
            Numbers of the L layers.
        """
        budgets = [self._cache.tokens(kept, num_tokens) for kept in self._kept]
        places = [self._place_of[layer] for layer in layers]
        num_heads = self._cache.layers[places[0]].num_kv_heads
        if self._shares is None:
            budget_N11 = torch.tensor(budgets)[:, None, None]
            return budget_N11.expand(-1, len(layers), num_heads)
        rows = [
            share_out(shares, budget, num_tokens, self._cache)
            for shares, budget in zip(self._shares, budgets, strict=True)
        ]
        return torch.stack([torch.stack([row[place] for place in places]) for row in rows])


def share_out(
    shares: Sequence[torch.Tensor], budget: int, num_tokens: int, cache: Cache
) -> list[torch.Tensor]:
    """Return whole entries in proportion to shares, of the bytes that ``budget`` a head would be.

    Each head gets at least 1 and at most what its layer can hold; between these bounds entries are
    in one proportion to the shares, rounded by largest remainder (Hamilton), so that the bytes are
    exact to less than one entry, and exact where all layers' entries weigh the same. Where too
    many bytes are wanted for the shares above 0, the rest goes to heads of share 0 evenly. Whole
    shares of the right sum are given as they are.

    Parameters
    ----------
    shares
        By layer, float [G], not negative.
    budget
        Entries a head that ``uniform`` would keep.
    num_tokens
        Tokens seen.
    cache
        All layers.

    Returns
    -------
    list of Tensor
        By layer, int64 [G].
    """
    unit = int(np.gcd.reduce(cache.size_X))
    size_X, most_X = cache.size_X // unit, cache.most_X(num_tokens)
    total = cache.num_bytes(budget, num_tokens) // unit
    share_X = torch.cat(tuple(shares)).double().numpy()
    wanted_X = fill(share_X, np.ones_like(most_X), most_X, size_X, total)
    return cache.by_layer(whole(wanted_X, most_X, size_X, total))
