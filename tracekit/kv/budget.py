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

import numpy as np
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

    X is all KV heads of all layers, in order.

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

    @cached_property
    def size_X(self) -> np.ndarray:
        """Bytes of one entry, by KV head."""
        return self.over_heads(self.entry_bytes_L)

    def most_X(self, num_tokens: int) -> np.ndarray:
        """Return the entries that each KV head can hold."""
        return self.over_heads([one.entries(num_tokens) for one in self.layers])

    def over_heads(self, values_L: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return a value of each layer for each of its KV heads: [X], of the type of [L]."""
        return np.repeat(values_L, self._heads_L)

    def by_layer(self, values_X: np.ndarray) -> list[torch.Tensor]:
        """Return values of all KV heads as one tensor [G] a layer."""
        return list(torch.from_numpy(values_X).split(self._heads_L))

    @cached_property
    def _heads_L(self) -> list[int]:
        return [one.num_kv_heads for one in self.layers]

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

    @property
    def looks(self) -> bool:
        """Whether the plan must know more of the layers than their shapes."""
        return self.needs != Needs()

    def observe(self, view: View) -> torch.Tensor | None:
        """Return what the plan must know of each layer of a stack at the first decision.

        Called if the budget ``looks``.

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

    @property
    def content(self) -> str:
        """What the plan depends on beside its parameters: the hash of a file; empty for most."""
        return ""

    def require(self, cache: Cache) -> None:
        """Raise, before anything is computed, if no plan can be made for a cache."""
        del cache

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
