"""Scale and ALiBi slopes of attention that names neither, fitted to what entered its softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tracekit.model.tap import AttentionCall
    from tracekit.spec import LayerSpec

_FLAT = 1e-3
"""Largest slope that is none: the steepest head of ALiBi has 0.25 or more before any scale."""

_SAME_SCALE = 1e-4
"""Relative difference of a fitted scale from a usual one that is taken for rounding."""

_BEND = 0.05
"""Largest distance of a logit from scale * (q k) + slope * position, rounding of q k aside."""


def fit_bias(call: AttentionCall) -> tuple[float, tuple[float, ...] | None]:
    """Return the scale of a call, and the slope of each head's bias, None where there is no bias.

    Least squares over the visible entries of logits = scale * (q k) + slope * position + anything
    that is the same along a row, which softmax does not see.

    Parameters
    ----------
    call
        Of a probe, alone in its batch.
    """
    logits_HQK = _seen_logits(call)
    if logits_HQK is None:
        assert call.scale is not None
        return float(call.scale), None
    product, position, logits = _centred(call, logits_HQK)
    # Each head's slope follows from the scale, and the scale is one for all heads: what positions
    # explain is taken out of the products first.
    square_H = (position * position).sum((-1, -2))
    by_product_H = (product * position).sum((-1, -2)) / square_H
    by_logits_H = (logits * position).sum((-1, -2)) / square_H
    scale = call.scale
    if scale is None:
        rest = product - by_product_H[:, None, None] * position
        scale = _usual(
            float((rest * logits).sum() / (rest * rest).sum()), call.query_BHQD.shape[-1]
        )
    slope_H = by_logits_H - float(scale) * by_product_H
    has_bias = bool(slope_H.abs().max() > _FLAT)
    return float(scale), tuple(slope_H.tolist()) if has_bias else None


def is_straight(call: AttentionCall, layer: LayerSpec) -> bool:
    """Return whether a call's biases are the layer's slopes times the keys' positions.

    In half precision biases are rounded the more, the farther they reach; outputs of a short probe
    hardly show it.
    """
    logits_HQK = _seen_logits(call)
    if layer.alibi is None or logits_HQK is None:
        return True
    product, position, logits = _centred(call, logits_HQK)
    slope_H11 = logits.new_tensor(layer.alibi)[:, None, None]
    bend = (logits - layer.scale * product - slope_H11 * position).abs().max()
    rounding = torch.finfo(call.value_BGKD.dtype).eps * layer.scale * product.abs().max()
    return bool(bend <= _BEND + rounding)


def _usual(scale: float, head_dim: int) -> float:
    """Return the scale that a fit stands for: that of queries scaled before, D^-1/2, or itself."""
    near = (one for one in (1.0, head_dim**-0.5) if abs(scale / one - 1) < _SAME_SCALE)
    return next(near, scale)


def _seen_logits(call: AttentionCall) -> torch.Tensor | None:
    """Return logits [H, Q, K] in float64, None where nothing but a scale can have entered them."""
    if call.logits_BHQK is not None:
        return call.logits_BHQK[0].double()
    if call.scale is None or not torch.is_tensor(call.mask) or not call.mask.is_floating_point():
        return None
    return call.scale * _product(call) + call.mask[0].double()


def _product(call: AttentionCall) -> torch.Tensor:
    """Return the products of queries and keys [H, Q, K] in float64."""
    query_HQD, key_GKD = call.query_BHQD[0].double(), call.key_BGKD[0].double()
    group = query_HQD.shape[0] // key_GKD.shape[0]
    return query_HQD @ key_GKD.repeat_interleave(group, dim=0).transpose(-1, -2)


def _centred(
    call: AttentionCall, logits_HQK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return products, positions and logits less their row's mean, 0 where keys are hidden."""
    # Hidden keys carry the smallest number of the model's type, or less.
    is_hidden = logits_HQK <= torch.finfo(call.value_BGKD.dtype).min / 2
    counts = (~is_hidden).sum(-1, keepdim=True)
    position_K = torch.arange(logits_HQK.shape[-1], device=logits_HQK.device).double()

    def centred(values: torch.Tensor) -> torch.Tensor:
        shown = values.expand_as(logits_HQK).masked_fill(is_hidden, 0)
        return (shown - shown.sum(-1, keepdim=True) / counts).masked_fill(is_hidden, 0)

    return centred(_product(call)), centred(position_K), centred(logits_HQK)
