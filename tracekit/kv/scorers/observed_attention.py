"""Keys that have received much attention from each row that could see them stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tracekit.kv.accumulate import Received
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("observed_attention")
@dataclass(frozen=True)
class ObservedAttention(Scorer):
    """Score = attention received from all rows so far / rows that could see the key.

    Serves ``observed`` (ObservedAttentionPress of kvpress 0.5.5). What ``h2o`` sums up is divided
    by the age of the key, so that the first keys do not win by having been there the longest; the
    newest ones, seen by few rows over few keys, win instead. A key that is held was seen by every
    row from its own on, in sliding layers too. Rows after an eviction are renormalised over what
    was kept, as they are computed. Difference: sums are in float32, where kvpress sums in the
    model's type.

    Parameters
    ----------
    reduce
        How each row's attention is reduced over the query heads of a KV head before it is summed.
    """

    reduce: Literal["mean", "max"] = "mean"

    presets: ClassVar = (Preset(name="observed"),)

    @property
    def needs(self) -> Needs:
        """The sum."""
        return Needs(accumulated=(Received(self.reduce),))

    def score(self, view: View) -> torch.Tensor:
        """Return the sums over ages, [N, L, G, K]."""
        num_rows_K = view.num_tokens - view.position_K
        return view.total_NLXK(Received(self.reduce)) / num_rows_K
