"""Keys that are unlike the others or that their neighbours attend to stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer
from tracekit.kv.scorers.leverage import Leverage
from tracekit.kv.scorers.non_causal import NonCausal

if TYPE_CHECKING:
    from tracekit.kv.view import View

LEAST_DEVIATION = 1e-6
"""Standard deviation that scores are divided by at least, as in kvpress."""


@SCORERS.register("compactor")
@dataclass(frozen=True)
class Compactor(Scorer):
    """Score = ``blend`` * z-score of the leverage + z-score of the attention without causal mask.

    Serves ``compactor`` (Compactor, Chari and Van Durme 2025, arXiv:2507.08143). The first and the
    newest positions stay and take part in neither score; z-scores are over all other held keys of
    the layer's KV heads together. Sums are rounded to 6 decimals, so that equal ones are equal in
    whichever order they were summed. Differences: those of ``leverage`` and ``noncausal``, exact
    leverage among them; ``blend`` is one number, where kvpress takes the removed fraction, by which
    one policy would not be one rule over all budgets.

    Parameters
    ----------
    sinks
        First positions, which stay and are left out.
    newest
        Newest positions, which stay and are left out.
    blend
        Weight of the leverage.
    chunk
        As in ``noncausal``.
    sketch, ridge
        As in ``leverage``.
    """

    sinks: int = 8
    newest: int = 4
    blend: float = 0.35
    chunk: int = 256
    sketch: int = 0
    ridge: float = 0.01

    presets: ClassVar = (Preset(name="compactor", sinks=8, recent="newest"),)

    def __post_init__(self) -> None:
        if self.newest < 0:
            msg = f"newest={self.newest} is a number of tokens, not negative."
            raise UsageError(msg)
        _ = self._leverage, self._attention  # they refuse bad parameters of their own

    @property
    def needs(self) -> Needs:
        """All three."""
        return Needs(keys=True, values=True, queries=True)

    def score(self, view: View) -> torch.Tensor:
        """Return weighted sums of z-scores, [N, L, G, K]; infinite for what stays."""
        end = view.num_tokens - self.newest
        counted_K = (view.position_K >= self.sinks) & (view.position_K < end)
        counted_NLGK = view.held_NLGK & counted_K
        leverage_NLGK, attention_NLGK = (
            _standardised(scorer.among(view, counted_NLGK), counted_NLGK)
            for scorer in (self._leverage, self._attention)
        )
        score_NLGK = (self.blend * leverage_NLGK + attention_NLGK).round(decimals=6)
        return score_NLGK.masked_fill(~counted_K, torch.inf)

    @property
    def _leverage(self) -> Leverage:
        return Leverage(self.sketch, self.ridge)

    @property
    def _attention(self) -> NonCausal:
        return NonCausal(self.chunk)


def _standardised(score_NLGK: torch.Tensor, counted_NLGK: torch.Tensor) -> torch.Tensor:
    """Return z-scores over the counted keys of all KV heads of a layer."""
    axes = (-2, -1)
    count_NL11 = counted_NLGK.sum(axes, keepdim=True)
    mean_NL11 = score_NLGK.where(counted_NLGK, 0).sum(axes, keepdim=True) / count_NL11.clamp(min=1)
    centred_NLGK = (score_NLGK - mean_NL11).where(counted_NLGK, 0)
    square_NL11 = centred_NLGK.square().sum(axes, keepdim=True)
    deviation_NL11 = (square_NL11 / (count_NL11 - 1).clamp(min=1)).sqrt()
    return centred_NLGK / deviation_NL11.clamp(min=LEAST_DEVIATION)
