"""How many entries each layer and head may keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.amounts import Amount


@dataclass(frozen=True)
class Budget(ABC):
    """A rule that turns a kept amount into entries a layer and head."""

    @abstractmethod
    def entries(
        self, kept: Sequence[Amount], num_tokens: int, num_layers: int, num_kv_heads: int
    ) -> torch.Tensor:
        """Return the entries to keep.

        Parameters
        ----------
        kept
            N kept amounts.
        num_tokens
            Tokens seen so far: the whole that fractions are taken of, in sliding layers too.
        num_layers, num_kv_heads
            L and G.

        Returns
        -------
        Tensor
            int64 [N, L, G], at least 1; may be more than a head holds.
        """


@dataclass(frozen=True)
class Uniform(Budget):
    """The same number of entries for each layer and head: floor(kept * tokens seen), at least 1."""

    def entries(
        self, kept: Sequence[Amount], num_tokens: int, num_layers: int, num_kv_heads: int
    ) -> torch.Tensor:
        """Return the entries to keep, int64 [N, L, G]."""
        budget_N = torch.tensor([max(1, amount.of(num_tokens)) for amount in kept])
        return budget_N[:, None, None].expand(-1, num_layers, num_kv_heads)
