"""Layers whose attention is spread out and keeps changing get more."""

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

_ROUNDING = 1e-12
"""Of a shift: what is less is noise of the softmax, and none."""


@LAYER_BUDGETS.register("cake")
@dataclass(frozen=True)
class Cake(LayerBudget):
    """Entries in proportion to entropy^(1 / tau1) * shift^(1 / tau2) of a layer's newest rows.

    Serves ``cake`` (CAKE, Qin et al. 2025, arXiv:2503.12491, section 4.1), with the score of
    SnapKV. Rows are the attention of the last ``cake_window`` queries to the keys before that
    window; entropy is summed over rows and heads, shift is the variance of a key's attention over
    the rows, summed over keys and heads. Where there is no key before the window, or no layer's
    attention changes, all layers get the same.

    Differences: the original takes the unbiased variance, the same proportions; it adds 1e-10 under
    the logarithm; it evicts layer by layer during the prompt, with the same result; it scores keys
    by their mean attention plus a multiple of its variance, where this one takes the mean alone.

    Parameters
    ----------
    cake_window
        Newest rows.
    tau1, tau2
        Temperatures of entropy and shift, above 0; the defaults are the paper's for
        Llama-3.1-8B at 1 024 entries.
    """

    cake_window: int = 32
    tau1: float = 1.6
    tau2: float = 0.4

    presets: ClassVar = (
        Preset(
            name="cake",
            what="SnapKV's score, more entries where attention is spread out and keeps changing",
            scorer="window_attention",
            recent="window",
            items=(("layers", "cake"), ("cake_window", "32"), ("tau1", "1.6"), ("tau2", "0.4")),
        ),
    )

    def __post_init__(self) -> None:
        if self.cake_window < 1 or not self.tau1 > 0 or not self.tau2 > 0:
            msg = (
                f"cake_window={self.cake_window} must be at least 1, tau1={self.tau1} and "
                f"tau2={self.tau2} above 0."
            )
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The newest rows' attention."""
        return Needs(last_queries=self.cake_window)

    def observe(self, view: View) -> torch.Tensor:
        """Return entropy and shift of each layer, float64 [L, 2]."""
        num_before = max(0, view.num_tokens - self.cake_window)
        before_LHQK = view.last_attention_NLHQK[0, ..., :num_before].double()
        entropy_L = torch.special.entr(before_LHQK).sum((-3, -2, -1))
        change_LHQK = before_LHQK - before_LHQK.mean(dim=-2, keepdim=True)
        shift_L = change_LHQK.square().mean(dim=-2).sum((-2, -1))
        return torch.stack([entropy_L, shift_L.where(shift_L > _ROUNDING, 0)], dim=-1)

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the preference of each layer, the largest entropy and shift being 1."""
        del budget, num_tokens
        stats_L2 = torch.stack(tuple(observed))
        part_L2 = stats_L2 / stats_L2.amax(0).clamp(min=torch.finfo(torch.float64).tiny)
        preference_L = part_L2[:, 0] ** (1 / self.tau1) * part_L2[:, 1] ** (1 / self.tau2)
        return cache.by_layer(cache.over_heads(preference_L.numpy()))
