"""The same for all layers and heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS, Cache, HeadBudget, LayerBudget

if TYPE_CHECKING:
    from collections.abc import Sequence


@LAYER_BUDGETS.register("uniform")
@dataclass(frozen=True)
class UniformLayers(LayerBudget):
    """The same number of entries for each head of each layer."""

    is_uniform: ClassVar = True

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return ones."""
        del budget, num_tokens, observed
        return [torch.ones(one.num_kv_heads) for one in cache.layers]


@HEAD_BUDGETS.register("uniform")
@dataclass(frozen=True)
class UniformHeads(HeadBudget):
    """The same number of entries for each head of a layer, or what the layer budget gave it."""

    is_uniform: ClassVar = True

    def share(self, order_NLGK: torch.Tensor, budget_NLG: torch.Tensor) -> torch.Tensor:
        """Return the budget as it is."""
        del order_NLGK
        return budget_NLG
