"""Keys that the newest row attends to stay, the same in all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.scorer import EVERY_STEP, SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("last_attention")
@dataclass(frozen=True)
class LastAttention(Scorer):
    """Score = attention of the newest row, mean over all query heads: one set for all heads.

    Serves ``tova`` (Oren et al. 2024, arXiv:2401.06104, section 3), decided at every step.
    Where heads hold different keys (their budgets differ), a head that has evicted a key counts
    as 0. Differences: the newest key stays, as in kvpress; the original may drop it. kvpress
    decides once, after the prompt: that is ``at=prompt``.
    """

    presets: ClassVar = (Preset(name="tova", recent="1", schedule=EVERY_STEP),)

    @property
    def needs(self) -> Needs:
        """The newest row's attention."""
        return Needs(last_queries=1)

    def score(self, view: View) -> torch.Tensor:
        """Return the means, [N, L, 1, K]."""
        attention_NLHK: torch.Tensor = view.last_attention_NLHQK[..., 0, :]
        return attention_NLHK.mean(dim=2, keepdim=True)
