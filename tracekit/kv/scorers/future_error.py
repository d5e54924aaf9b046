"""A bound: keys whose absence later outputs would feel most stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View

LEAST_REST = 1e-9
"""Attention that a row leaves to all keys but one, at least: below, what remains has no digits."""

EQUAL = 1e-12
"""Squared distance, of the squares of what is compared, that rounding alone can make."""


@SCORERS.register("future_error")
@dataclass(frozen=True)
class FutureError(Scorer):
    """Score = squared error that evicting a key alone would make in the outputs of all later rows.

    Serves ``oracle_error``: sum over later rows and query heads of (a / (1 - a))^2 ||o - v||^2,
    the exact change of an output o when a key of weight a and value v leaves it (CAOTE, Goel et
    al. 2025, arXiv:2504.14051, of one row that has been seen). Rows are renormalised over what is
    held at the decision and what comes after it. Errors of several keys do not add up, so this is
    a strong reference, not a proven optimum; no decoder knows the rows, so it is never recommended.

    For the largest weight of a row, which may be near 1, the same is computed as a^2 ||r - v||^2,
    where r is the output of the other keys alone. Where these (a sink logit's share included) have
    less than ``LEAST_REST`` of the row, r is taken as if they had that much. Distances that
    rounding alone can make count as 0. Computed in float64.
    """

    presets: ClassVar = (Preset(name="oracle_error"),)
    causal: ClassVar = False

    @property
    def needs(self) -> Needs:
        """The rows to come."""
        return Needs(future=True)

    def score(self, view: View) -> torch.Tensor:
        """Return the sums, [N, L, G, K]; zeros if no row follows."""
        held_NLGK = view.held_NLGK
        value_LGTD = view.later.value_LGTD.double()
        total_NLGK = value_LGTD.new_zeros(held_NLGK.shape)
        for _, weights_LGNMQK in view.later.weights(held_NLGK):
            value_LGKD = value_LGTD[..., : weights_LGNMQK.shape[-1], :]
            weights_LGXK = weights_LGNMQK.flatten(2, 4).double()
            sink_LGX1 = torch.zeros_like(weights_LGXK[..., :1])
            if view.layer.sinks is not None:
                sink_LGX1 = (1 - weights_LGXK.sum(-1, keepdim=True)).clamp(min=0)
            error_LGXK = _errors(weights_LGXK, value_LGKD, sink_LGX1)[..., : view.num_tokens]
            error_LGNMQK = error_LGXK.unflatten(2, weights_LGNMQK.shape[2:5])
            total_NLGK += error_LGNMQK.sum((3, 4)).permute(2, 0, 1, 3)
        return total_NLGK


def _errors(
    weights_LGXK: torch.Tensor, value_LGKD: torch.Tensor, sink_LGX1: torch.Tensor
) -> torch.Tensor:
    """Return the squared error [L, G, X, K] of each of X rows without each key."""
    most_LGX1, top_LGX1 = weights_LGXK.max(-1, keepdim=True)
    top_value_LGXD = value_LGKD.gather(
        -2, top_LGX1.expand(*top_LGX1.shape[:3], value_LGKD.shape[-1])
    )
    others_LGXK = weights_LGXK.scatter(-1, top_LGX1, 0.0)
    sum_LGXD = others_LGXK @ value_LGKD
    output_LGXD = sum_LGXD + most_LGX1 * top_value_LGXD
    size_LGXK = _square(output_LGXD)[..., None] + _square(value_LGKD)[..., None, :]
    distance_LGXK = size_LGXK - 2 * output_LGXD @ value_LGKD.transpose(-1, -2)
    # No other weight is above 1 / 2: nothing is divided by less than that.
    error_LGXK = (others_LGXK / (1 - others_LGXK)).square()
    error_LGXK *= _unless_equal(distance_LGXK, size_LGXK)
    rest_LGX1 = (others_LGXK.sum(-1, keepdim=True) + sink_LGX1).clamp(min=LEAST_REST)
    rest_LGXD = sum_LGXD / rest_LGX1
    top_distance_LGX = _unless_equal(
        _square(rest_LGXD - top_value_LGXD), _square(rest_LGXD) + _square(top_value_LGXD)
    )
    return error_LGXK.scatter_(-1, top_LGX1, most_LGX1.square() * top_distance_LGX[..., None])


def _square(array_XD: torch.Tensor) -> torch.Tensor:
    return array_XD.square().sum(-1)


def _unless_equal(distance: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Return squared distances, 0 where the two are equal but for rounding."""
    return distance.where(distance > EQUAL * size, 0)
