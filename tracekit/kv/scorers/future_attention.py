"""A bound: keys that later rows will attend to stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("future_attention")
@dataclass(frozen=True)
class FutureAttention(Scorer):
    """Score = attention that a key will receive from all later rows, mean over the group's heads.

    Serves ``oracle``: what is evicted is gone, and it is what will be attended to least. Rows are
    renormalised over what is held at the decision and what comes after it. No decoder knows them,
    so this bounds the mass that a rule can keep and is never recommended; a strong reference, not
    a proven optimum of the output's error, which is no sum over keys.
    """

    presets: ClassVar = (Preset(name="oracle"),)
    causal: ClassVar = False

    @property
    def needs(self) -> Needs:
        """The rows to come."""
        return Needs(future=True)

    def score(self, view: View) -> torch.Tensor:
        """Return the sums, [N, L, G, K]; zeros if no row follows."""
        held_NLGK = view.held_NLGK
        total_NLGK = view.later.key_LGTD.new_zeros(held_NLGK.shape)
        for _, weights_LGNMQK in view.later.weights(held_NLGK):
            received_LGNK = weights_LGNMQK[..., : view.num_tokens].mean(3).sum(3)
            total_NLGK += received_LGNK.permute(2, 0, 1, 3)
        return total_NLGK
