"""Keys that have received much attention for a large value stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.accumulate import Received, Reduce
from tracekit.kv.scorer import EVERY_STEP, SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("value_attention")
@dataclass(frozen=True)
class ValueAttention(Scorer):
    """Score = attention received from all rows so far, times the L1 norm of the value.

    Serves ``vatp`` (VATP, Guo et al. 2024, arXiv:2406.12335) on top of H2O: half of the
    budget for the newest keys, decided at every step, the first 20 positions stay. Differences are
    those of ``h2o``: one set a KV head, and the budget is a part of the tokens seen.

    Parameters
    ----------
    reduce
        How each row's attention is reduced over the query heads of a KV head before it is summed.
        ``mean`` and ``sum`` keep the same keys.
    """

    reduce: Reduce = "mean"

    presets: ClassVar = (Preset(name="vatp", sinks=20, recent="0.5", schedule=EVERY_STEP),)

    @property
    def needs(self) -> Needs:
        """The sum, and values."""
        return Needs(values=True, accumulated=(Received(self.reduce),))

    def score(self, view: View) -> torch.Tensor:
        """Return sums times norms, [N, L, G, K]."""
        norm_LGK: torch.Tensor = view.value_LGKD.abs().sum(-1)
        return view.total_NLXK(Received(self.reduce)) * norm_LGK
