"""Keys that have received much attention so far stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.accumulate import Received, Reduce
from tracekit.kv.scorer import EVERY_STEP, SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("accumulated")
@dataclass(frozen=True)
class Accumulated(Scorer):
    """Score = attention received from all rows so far, prompt included.

    Serves ``h2o`` (Zhang et al. 2023, arXiv:2306.14048, section 4 and algorithm 1): half of the
    budget for the newest keys, the other half by score, decided at every step. Rows after an
    eviction are renormalised over what was kept, as they are computed. Differences: one set a KV
    head, where the original keeps one a query head; the budget is a part of the tokens seen, where
    the original fixes it from the prompt's length.

    Parameters
    ----------
    reduce
        How each row's attention is reduced over the query heads of a KV head before it is summed.
        ``mean`` and ``sum`` keep the same keys.
    """

    reduce: Reduce = "mean"

    presets: ClassVar = (Preset(name="h2o", recent="0.5", schedule=EVERY_STEP),)

    @property
    def needs(self) -> Needs:
        """The sum."""
        return Needs(accumulated=(Received(self.reduce),))

    def score(self, view: View) -> torch.Tensor:
        """Return the sums, [N, L, G, K]."""
        return view.total_NLXK(Received(self.reduce))
