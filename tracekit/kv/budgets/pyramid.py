"""Many entries in the first layers, few in the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.errors import UsageError
from tracekit.kv.budget import LAYER_BUDGETS, Cache, LayerBudget
from tracekit.kv.scorer import Preset

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@LAYER_BUDGETS.register("pyramid")
@dataclass(frozen=True)
class Pyramid(LayerBudget):
    """Entries fall in equal steps from the first layer to the last.

    Serves ``pyramidkv`` (PyramidKV, Cai et al. 2024, arXiv:2406.02069, section 3.2), with the score
    of SnapKV. Of a budget of b entries a head and n tokens seen, the last layer gets b / ``beta``
    and the first 2 b - b / ``beta``, or n - ``pyramid_window`` if that is less, the last then what
    keeps the mean at b. Layers are counted among those that hold keys.

    Differences: as in kvpress the newest keys are a part of b, not added to it, and where the last
    layer would get fewer than ``pyramid_window`` entries all layers get the same. kvpress takes b
    before rounding down, and its sum is exact only where b is whole; for whole b all layers are
    equal to its own.

    Parameters
    ----------
    beta
        How steep, at least 1: with 1 all layers get the same.
    pyramid_window
        The scorer's ``window``: newest keys that stay in each layer.
    """

    beta: float = 20.0
    pyramid_window: int = 32

    presets: ClassVar = (
        Preset(
            name="pyramidkv",
            what="SnapKV's score, fewer entries from the first layer to the last",
            scorer="window_attention",
            recent="window",
            items=(("layers", "pyramid"), ("beta", "20.0"), ("pyramid_window", "32")),
        ),
    )

    def __post_init__(self) -> None:
        if not self.beta >= 1 or self.pyramid_window < 0:
            msg = (
                f"beta={self.beta} must be at least 1 and pyramid_window={self.pyramid_window} a "
                "number of tokens."
            )
            raise UsageError(msg)

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the schedule, each number rounded half to even: by symmetry the sum stays."""
        del observed
        first, last = self._ends(budget, num_tokens)
        num_layers = len(cache.layers)
        step = (first - last) / max(1, num_layers - 1)
        entries_L = [float(round(first - place * step)) for place in range(num_layers)]
        return cache.by_layer(cache.over_heads(entries_L))

    def _ends(self, budget: int, num_tokens: int) -> tuple[float, float]:
        """Return the entries of the first and of the last layer."""
        last = budget / self.beta
        first = 2 * budget - last
        most = num_tokens - self.pyramid_window
        if first >= most:
            first, last = most, 2 * budget - most
        if not num_tokens >= first >= last >= self.pyramid_window:
            return budget, budget
        return first, last
