"""How many entries each layer and head may keep: shared out over layers, then over heads.

Over layers and heads at once goes a ``LayerBudget``: a plan, made of what all layers look like at
the first decision and frozen then. Over the heads of one layer goes a ``HeadBudget``: at every
decision, from the scores of that layer. Whatever is shared out, the sum stays what ``uniform``
would hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.kv.amounts import Bytes
from tracekit.kv.scorer import Needs, Preset
from tracekit.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.amounts import Amount
    from tracekit.kv.view import View
    from tracekit.spec import LayerSpec


@dataclass(frozen=True)
class Cache:
    """The layers that hold keys, and what an entry of theirs weighs.

    Parameters
    ----------
    layers
        All layers with keys of their own, in order: a plan is made over all of them.
    bytes_per_number
        Of a number of the cache.
    """

    layers: tuple[LayerSpec, ...]
    bytes_per_number: int = 2

    @cached_property
    def entry_bytes_L(self) -> tuple[int, ...]:
        """Bytes of one entry of one KV head, by layer."""
        return tuple(self.bytes_per_number * (one.head_dim + one.value_dim) for one in self.layers)

    def num_bytes(self, budget: int, num_tokens: int) -> int:
        """Return the bytes that ``budget`` entries a head are, as far as layers can hold them."""
        return sum(
            one.num_kv_heads * size * min(budget, one.entries(num_tokens))
            for one, size in zip(self.layers, self.entry_bytes_L, strict=True)
        )

    def tokens(self, kept: Amount, num_tokens: int) -> int:
        """Return the entries a head that an amount is of a sequence, at least 1.

        Fractions are taken of the tokens seen, in sliding layers too. Bytes are the most entries a
        head, the same in all, that fit into them.
        """
        if kept.unit != Bytes.unit:
            return max(1, kept.of(num_tokens))
        low, high = 1, num_tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.num_bytes(middle, num_tokens) <= kept.amount
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def share(self, kept: Amount, num_tokens: int) -> float:
        """Return the fraction of the tokens seen that an amount is, at most 1."""
        if kept.unit != Bytes.unit:
            return kept.share(num_tokens)
        return self.tokens(kept, num_tokens) / num_tokens


@dataclass(frozen=True)
class LayerBudget(ABC):
    """Shares the cache out over layers (and their heads). Parameters are dataclass fields."""

    presets: ClassVar[tuple[Preset, ...]] = ()
    is_uniform: ClassVar[bool] = False
    """Whether all layers and heads get the same: nothing to plan."""

    @property
    def needs(self) -> Needs:
        """What ``observe`` reads."""
        return Needs()

    def observe(self, view: View) -> torch.Tensor | None:
        """Return what the plan must know of each layer of a stack at the first decision.

        Parameters
        ----------
        view
            What is known then; N = 1.

        Returns
        -------
        Tensor or None
            [L, ...]; None if the plan needs nothing.
        """
        del view
        return None

    @abstractmethod
    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the shares of layers and heads, frozen from the first decision on.

        Parameters
        ----------
        cache
            All layers.
        budget
            Entries a head that ``uniform`` would keep at the first decision.
        num_tokens
            Tokens seen then.
        observed
            By layer, what ``observe`` gave; empty if it gave nothing.

        Returns
        -------
        sequence of Tensor
            By layer, float64 [G]: entries wanted, of which only the proportions count.
        """


@dataclass(frozen=True)
class HeadBudget(ABC):
    """Shares the budget of one layer out over its heads. Parameters are dataclass fields."""

    presets: ClassVar[tuple[Preset, ...]] = ()
    is_uniform: ClassVar[bool] = False
    """Whether all heads of a layer get the same."""

    @abstractmethod
    def share(self, order_NLGK: torch.Tensor, budget_NLG: torch.Tensor) -> torch.Tensor:
        """Return the entries of each head.

        Parameters
        ----------
        order_NLGK
            int64: how much a key is wanted, protection, score and position in one number; the
            lowest possible number where no key is held.
        budget_NLG
            int64, what each head was given.

        Returns
        -------
        Tensor
            int64 [N, L, G] at least 1, of the same sum over the heads.
        """


LAYER_BUDGETS: Registry[LayerBudget] = Registry(
    "layer budget", package="tracekit.kv.budgets", group="tracekit.layer_budgets"
)
HEAD_BUDGETS: Registry[HeadBudget] = Registry(
    "head budget", package="tracekit.kv.budgets", group="tracekit.head_budgets"
)


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

    def entries(self, num_tokens: int, layers: Sequence[int]) -> torch.Tensor:
        """Return int64 [N, L, G] for layers of one shape, given by their numbers."""
        budgets = [self._cache.tokens(kept, num_tokens) for kept in self._kept]
        at = {one.index: place for place, one in enumerate(self._cache.layers)}
        places = [at[layer] for layer in layers]
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
    many bytes are wanted for the shares above 0, the rest goes to heads of share 0 evenly.

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
    heads = [one.num_kv_heads for one in cache.layers]
    size_X = _by_head(cache.entry_bytes_L, heads)
    cap_X = _by_head([one.entries(num_tokens) for one in cache.layers], heads)
    share_X = torch.cat([one.double() for one in shares])
    share_X = share_X.clamp(min=share_X.max() * 1e-9 if bool(share_X.max() > 0) else 1.0)
    total = max(cache.num_bytes(budget, num_tokens), int(size_X.sum()))
    wanted_X = _fill(share_X, cap_X, size_X, total)
    whole_X = wanted_X.floor().clamp(min=1).long()
    left = total - int((whole_X * size_X).sum())
    # Rounding up to 1 may have taken more than there is: the largest heads give it back.
    while left < 0:
        most = int((whole_X - wanted_X).where(whole_X > 1, -torch.inf).argmax())
        whole_X[most] -= 1
        left += int(size_X[most])
    order = (wanted_X - whole_X).argsort(descending=True, stable=True)
    while left > 0:
        room = [x for x in order.tolist() if whole_X[x] < cap_X[x] and size_X[x] <= left]
        if not room:
            break
        for x in room:
            if size_X[x] <= left:
                whole_X[x] += 1
                left -= int(size_X[x])
    return list(whole_X.split(heads))


def _fill(
    share_X: torch.Tensor, cap_X: torch.Tensor, size_X: torch.Tensor, total: int
) -> torch.Tensor:
    """Return min(cap, max(1, level * share)) with the level at which the bytes are ``total``."""
    low, high = 0.0, float((cap_X / share_X).max())
    for _ in range(100):
        level = (low + high) / 2
        used = (torch.minimum((level * share_X).clamp(min=1), cap_X.double()) * size_X).sum()
        low, high = (level, high) if float(used) <= total else (low, level)
    filled_X = torch.minimum((low * share_X).clamp(min=1), cap_X.double())
    # A level found by halving is a little low: what should be whole must not be floored away.
    near_X = filled_X.round()
    return near_X.where((filled_X - near_X).abs() < 1e-6 * near_X.clamp(min=1), filled_X)


def _by_head(values: Sequence[int], heads: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values).repeat_interleave(torch.tensor(heads))
