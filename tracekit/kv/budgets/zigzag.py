"""Layers that need many keys for most of their attention get more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.budget import LAYER_BUDGETS, Cache, LayerBudget
from tracekit.kv.scorer import Needs, Preset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.view import View

_SLACK = 1e-6
"""Of a row's mass: rounding must not decide whether a key is needed."""


@LAYER_BUDGETS.register("zigzag")
@dataclass(frozen=True)
class ZigZag(LayerBudget):
    """Entries in proportion to the fewest keys that hold a part of the attention mass.

    Serves ``zigzagkv`` (ZigZagKV, Zhong et al. 2024, arXiv:2412.09036), with the score of SnapKV.
    For each of the last ``zigzag_window`` rows of each query head the fewest keys are counted whose
    attention is ``zigzag_mass`` of all that the row gives to keys; their mean over rows and heads
    is the layer's LMBA, and the budgets are in proportion to it.

    Parameters
    ----------
    zigzag_window
        Newest rows.
    zigzag_mass
        Part of a row's attention, in (0, 1].
    """

    zigzag_window: int = 32
    zigzag_mass: float = 0.9

    presets: ClassVar = (
        Preset(
            name="zigzagkv",
            what="SnapKV's score, more entries where most of the attention needs more keys",
            scorer="window_attention",
            recent="window",
            items=(("layers", "zigzag"), ("zigzag_window", "32"), ("zigzag_mass", "0.9")),
        ),
    )

    def __post_init__(self) -> None:
        if self.zigzag_window < 1 or not 0 < self.zigzag_mass <= 1:
            msg = (
                f"zigzag_window={self.zigzag_window} must be at least 1 and "
                f"zigzag_mass={self.zigzag_mass} in (0, 1]."
            )
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The newest rows' attention."""
        return Needs(last_queries=self.zigzag_window)

    def observe(self, view: View) -> torch.Tensor:
        """Return the LMBA of each layer, float64 [L]."""
        sorted_LHQK = view.last_attention_NLHQK[0].sort(dim=-1, descending=True).values.double()
        sum_LHQK = sorted_LHQK.cumsum(-1)
        total_LHQ1 = sum_LHQK[..., -1:]
        count_LHQ = 1 + (sum_LHQK < (self.zigzag_mass - _SLACK) * total_LHQ1).sum(-1)
        return count_LHQ.double().mean((-2, -1))

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the LMBA, the same for all heads of a layer."""
        del budget, num_tokens
        return cache.by_layer(cache.over_heads(torch.stack(tuple(observed)).numpy()))
