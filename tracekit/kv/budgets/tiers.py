"""A least number of entries by depth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import UsageError
from tracekit.kv.budget import LAYER_BUDGETS, Cache, LayerBudget
from tracekit.kv.fill import fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@LAYER_BUDGETS.register("tiers")
@dataclass(frozen=True)
class Tiers(LayerBudget):
    """Shallow layers keep at least one fraction of the tokens, deep layers at least another.

    The total stays that of ``kept``: what the floors leave is given to the layers with the fewest
    entries, as evenly as the floors allow. Where the floors alone need more than the total, all
    layers get the same part of theirs. Depth is counted among the layers that hold keys.

    Parameters
    ----------
    shallow, deep
        Least fraction of the tokens seen, rounded up (in sliding layers at most their window).
    deep_from
        Depth at which deep layers start; the first layer is at 0, the last at 1.
    """

    shallow: float = 0.2
    deep: float = 0.7
    deep_from: float = 0.67

    def __post_init__(self) -> None:
        values = (self.shallow, self.deep, self.deep_from)
        if not all(0 <= one <= 1 for one in values):
            msg = f"shallow, deep and deep_from are fractions in [0, 1], unlike {values}."
            raise UsageError(msg)

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the floors, and above them a level that is the same for all."""
        del observed
        num_layers, most_X = len(cache.layers), cache.most_X(num_tokens)
        floor_L = [
            math.ceil(Fraction(repr(self._least(place, num_layers))) * num_tokens)
            for place in range(num_layers)
        ]
        floor_X = np.clip(cache.over_heads(floor_L), 1, most_X)
        total = cache.num_bytes(budget, num_tokens)
        if cache.size_X @ floor_X > total:
            return cache.by_layer(floor_X.astype(np.float64))
        even_X = np.ones(len(floor_X))
        return cache.by_layer(fill(even_X, floor_X, most_X, cache.size_X, total))

    def _least(self, place: int, num_layers: int) -> float:
        depth = place / max(1, num_layers - 1)
        return self.deep if depth >= self.deep_from else self.shallow
