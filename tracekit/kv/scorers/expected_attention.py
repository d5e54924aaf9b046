"""Keys that coming queries are expected to attend to stay, weighted by their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer
from tracekit.measure.rope import average, undo

if TYPE_CHECKING:
    from tracekit.kv.view import View


MOST_FUTURE = 2**20
"""Coming positions over which rotations are averaged."""


@SCORERS.register("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Score = expected attention of coming queries, times the L2 norm of the value.

    Serves ``expected`` (Devoto et al. 2025, arXiv:2510.00636, as kvpress's
    ``ExpectedAttentionPress`` computes it). Pre-RoPE queries of all rows so far but those of the
    sinks are taken as normal with their mean mu and covariance S, and turned by the mean rotation R
    of the next ``future`` positions. A key's logit is scale k R mu + scale^2 / 2 k R S R^T k, the
    logarithm of the expectation of exp(scale q k); softmax over the held keys but the sinks, mean
    over the group.

    Layers without rotary embedding need no R. Soft-caps, ALiBi slopes and sink logits are not in
    the expectation. Evicted keys leave the softmax; their rows stay in the moments, which take no
    room in the cache. Difference: queries are turned back from what was recorded, so half precision
    leaves its rounding in them.

    Parameters
    ----------
    sinks
        First positions, which stay, and whose rows and keys are left out.
    future
        Coming positions that are averaged over.
    epsilon
        Added to the expected attention before it is multiplied by the norm.
    """

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0

    presets: ClassVar = (Preset(name="expected", sinks=4),)

    def __post_init__(self) -> None:
        if not 1 <= self.future <= MOST_FUTURE or self.epsilon < 0:
            msg = f"future={self.future} must be 1 to {MOST_FUTURE}, epsilon={self.epsilon} not negative."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """All three."""
        return Needs(keys=True, values=True, queries=True)

    def score(self, view: View) -> torch.Tensor:
        """Return expected attention times norms, [N, L, G, K]; infinite for sinks."""
        layers = range(len(view.layers))
        logits_LGMK = torch.stack([self._logits_GMK(view, at) for at in layers])
        is_sink_K = view.position_K < self.sinks
        left_NLG1K = (view.held_NLGK & ~is_sink_K)[:, :, :, None]
        expected_NLGK = torch.where(left_NLG1K, logits_LGMK, -torch.inf).softmax(-1).mean(3)
        score_NLGK: torch.Tensor = (expected_NLGK + self.epsilon) * view.value_LGKD.norm(dim=-1)
        return score_NLGK.masked_fill(is_sink_K, torch.inf)

    def _logits_GMK(self, view: View, at: int) -> torch.Tensor:
        """Return the expected logits of one layer."""
        scale, groups = view.layer.scale, (view.layer.num_kv_heads, -1)
        mean_GMD, covariance_GMDD = (one.unflatten(0, groups) for one in self._moments(view, at))
        key_G1KD = view.key_LGKD[at][:, None]
        linear_GMK = (key_G1KD @ mean_GMD[..., None])[..., 0]
        square_GMK = (key_G1KD @ covariance_GMDD * key_G1KD).sum(-1)
        logits_GMK: torch.Tensor = scale * linear_GMK + scale**2 / 2 * square_GMK
        return logits_GMK

    def _moments(self, view: View, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean [H, D] and covariance [H, D, D] of coming queries of one layer."""
        query_HTD = view.query_LHKD[at, :, self.sinks :]
        if view.rope is not None:
            query_HTD = undo(query_HTD, view.position_K[self.sinks :], view.rope)
        mean_HD = query_HTD.mean(1)
        centred_HTD = query_HTD - mean_HD[:, None]
        covariance_HDD = centred_HTD.mT @ centred_HTD / query_HTD.shape[1]
        if view.rope is None:
            return mean_HD, covariance_HDD
        return average(
            mean_HD,
            covariance_HDD,
            view.rope,
            first_position=view.num_tokens,
            num_positions=self.future,
        )
