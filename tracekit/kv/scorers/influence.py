"""A bound: keys whose absence the model's own predictions would feel most stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer
from tracekit.measure.influence import BLOCK_ROWS

if TYPE_CHECKING:
    from tracekit.kv.view import Future, View

MOST = 1 - 1e-6
"""Attention on one key, at most: above, what is left of the row has no digits."""

ROUNDING = 1e-10
"""Sum of effects, of the sum of their possible sizes, that rounding alone can make."""


@SCORERS.register("influence")
@dataclass(frozen=True)
class Influence(Scorer):
    """Score = predicted harm: the KL that evicting a key alone would make, told by influence probes.

    Serves ``influence``. Without a key of attention a and value v, a row's output o moves by
    a / (1 - a) (o - v); times the recorded gradient there, summed over the query heads of the group
    and blocks of 16 later rows, squared, summed over blocks, mean over probes: what
    ``measure.influence`` makes of the key's eviction, up to a factor that all keys share
    (the Gauss-Newton estimate of the KL). Rows are renormalised over what is held at the
    decision and what comes after it; attention above 1 - 1e-6 counts as that. Harms of several keys
    do not add up, so this is a strong reference, not a proven optimum; no decoder knows the rows, so
    it is never recommended. Sums that rounding alone can make count as 0. Computed in float64.
    """

    presets: ClassVar = (Preset(name="influence"),)
    causal: ClassVar = False

    @property
    def needs(self) -> Needs:
        """The rows to come, and the probes' gradients there."""
        return Needs(future=True, influence=True)

    def score(self, view: View) -> torch.Tensor:
        """Return the harms, float64 [N, L, G, K]; zeros if no row follows.

        Raises
        ------
        UsageError
            If there are no probes from the decision on.
        """
        view.later.require_influence(view.num_tokens)
        # One layer's rows may serve several caches, side by side along L.
        held_NLSGK = view.held_NLGK.unflatten(1, (len(view.later.key_LGTD), -1))
        harms = [_harm(later, held_NLSGK[:, at]) for at, later in enumerate(view.later.by_layer())]
        return torch.cat(harms, dim=1)


def _harm(later: Future, held_NLGK: torch.Tensor) -> torch.Tensor:
    """Return the harm [N, L, G, K] of each key of one layer."""
    harm_NLGK = later.value_LGTD.new_zeros(held_NLGK.shape)
    num_tokens = held_NLGK.shape[-1]
    for start in range(num_tokens, later.num_rows, BLOCK_ROWS):
        rows = range(start, min(start + BLOCK_ROWS, later.num_rows))
        moved: torch.Tensor | float = 0.0
        bound: torch.Tensor | float = 0.0
        for first, weights_LGNMQK in later.weights(held_NLGK, rows, width=later.num_probes):
            moved_LGNPK, bound_LGNPK = _moved(later, first, weights_LGNMQK, num_tokens)
            moved, bound = moved + moved_LGNPK, bound + bound_LGNPK
        moved, bound = torch.as_tensor(moved), torch.as_tensor(bound)
        effect_LGNPK = moved.where(moved.abs() > ROUNDING * bound, 0)
        harm_NLGK += effect_LGNPK.square().mean(3).permute(2, 0, 1, 3)
    return harm_NLGK


def _moved(
    later: Future, first: int, weights_LGNMQK: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradient times change of output without each key, summed over rows, and its bound.

    <g, a / (1 - a) (o - v)>, split: outputs o differ by set, values v do not. The bound has the
    norms in place of the products.
    """
    end = first + weights_LGNMQK.shape[-2]
    value_LGKD = later.value_LGTD[:, :, :end]
    gradient_LPHQD = later.influence(first, end)
    gradient_LGPXD = gradient_LPHQD.unflatten(2, (later.layer.num_kv_heads, -1)).movedim(2, 1)
    gradient_LGPXD = gradient_LGPXD.flatten(3, 4)
    weights_LGNXK = weights_LGNMQK.flatten(3, 4)
    output_LGNXD = weights_LGNXK @ value_LGKD[:, :, None]
    share_LGNXK = weights_LGNXK[..., :num_tokens].clamp(max=MOST)
    share_LGNXK = share_LGNXK / (1 - share_LGNXK)
    value_LGKD = value_LGKD[:, :, :num_tokens]
    along_LGNPX = torch.einsum("lgpxd,lgnxd->lgnpx", gradient_LGPXD, output_LGNXD)
    # Probes as rows of one matrix: values, shared by all of them, are not copied for each.
    against_LGYK = gradient_LGPXD.flatten(2, 3) @ value_LGKD.mT
    against_LGPXK = against_LGYK.unflatten(2, gradient_LGPXD.shape[2:4])
    moved_LGNPK = along_LGNPX @ share_LGNXK
    moved_LGNPK -= (share_LGNXK[:, :, :, None] * against_LGPXK[:, :, None]).sum(-2)
    size_LG1PX = gradient_LGPXD.norm(dim=-1)[:, :, None]
    value_size_LG11K = value_LGKD.norm(dim=-1)[:, :, None, None]
    bound_LGNPK = (size_LG1PX * output_LGNXD.norm(dim=-1)[:, :, :, None]) @ share_LGNXK
    bound_LGNPK += value_size_LG11K * (size_LG1PX @ share_LGNXK)
    return moved_LGNPK, bound_LGNPK
