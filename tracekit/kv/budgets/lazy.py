"""Layers that look at the first and the newest keys alone keep these alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tracekit.errors import UsageError
from tracekit.kv.budget import LAYER_BUDGETS, Cache, LayerBudget
from tracekit.kv.fill import fill
from tracekit.kv.scorer import Needs, Preset

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tracekit.kv.view import View

_SLACK = 1e-6
"""Of the mass: rounding must not make a layer lazy."""


@LAYER_BUDGETS.register("lazy")
@dataclass(frozen=True)
class Lazy(LayerBudget):
    """A lazy layer keeps ``lazy_sinks`` + ``lazy_recent`` entries, the others share the rest.

    Serves ``simlayerkv`` (SimLayerKV, Zhang et al. 2024, arXiv:2410.13846, section 4): a layer is
    lazy if its last rows put more than ``lazy_threshold`` of their attention, in the mean over rows
    and query heads, on the first ``lazy_sinks`` and the newest ``lazy_recent`` keys.

    Differences: the original keeps all keys of the other layers, whatever the total. Here the total
    stays that of ``kept``: the other layers share evenly what is left, each keeping its first and
    newest keys, and what they cannot use goes back to the lazy ones. Lazy layers get no more than
    ``uniform`` would give them. So all layers get the same where all or none are lazy, or where
    ``kept`` is less than lazy layers may have. kvpress counts keys that are both first and newest
    twice, and keeps ``lazy_recent`` - 1 of the newest.

    Parameters
    ----------
    lazy_sinks, lazy_recent
        First and newest keys.
    lazy_threshold
        Mass above which a layer is lazy, in [0, 1]; the paper's for Llama-3 (Llama-2 0.65, Mistral
        0.8, Qwen 0.85).
    lazy_rows
        Newest rows that are looked at.
    """

    lazy_sinks: int = 4
    lazy_recent: int = 1024
    lazy_threshold: float = 0.9
    lazy_rows: int = 1

    presets: ClassVar = (
        Preset(
            name="simlayerkv",
            what="Sinks and the newest keys, few in layers that look at these alone",
            scorer="recency",
            sinks=4,
            items=(
                ("layers", "lazy"),
                ("lazy_sinks", "4"),
                ("lazy_recent", "1024"),
                ("lazy_threshold", "0.9"),
                ("lazy_rows", "1"),
            ),
        ),
    )

    def __post_init__(self) -> None:
        if min(self.lazy_sinks, self.lazy_recent - 1, self.lazy_rows - 1) < 0:
            msg = (
                f"lazy_sinks={self.lazy_sinks} must not be negative, lazy_recent="
                f"{self.lazy_recent} and lazy_rows={self.lazy_rows} at least 1."
            )
            raise UsageError(msg)
        if not 0 <= self.lazy_threshold <= 1:
            msg = f"lazy_threshold={self.lazy_threshold} is a mass, in [0, 1]."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The newest rows' attention."""
        return Needs(last_queries=self.lazy_rows)

    def observe(self, view: View) -> torch.Tensor:
        """Return the mass on the first and the newest keys of each layer, float64 [L]."""
        is_newest_K = view.position_K >= view.num_tokens - self.lazy_recent
        is_edge_K = (view.position_K < self.lazy_sinks) | is_newest_K
        edge_LHQK = view.last_attention_NLHQK[0].double() * is_edge_K
        return edge_LHQK.sum(-1).mean((-2, -1))

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return what lazy layers keep, and an even level for the others."""
        is_lazy_L = [float(mass) > self.lazy_threshold + _SLACK for mass in observed]
        is_lazy_X = cache.over_heads(is_lazy_L)
        most_X = cache.most_X(num_tokens)
        few_X = np.minimum(min(budget, self.lazy_sinks + self.lazy_recent), most_X)
        low_X, high_X = np.where(is_lazy_X, few_X, 1), np.where(is_lazy_X, few_X, most_X)
        total = cache.num_bytes(budget, num_tokens)
        return cache.by_layer(fill(np.ones(len(low_X)), low_X, high_X, cache.size_X, total))
