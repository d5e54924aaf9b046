"""Attention of a layer's later rows that gradients flow through: into queries, new keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tracekit.measure.attention import logits_HQK, outputs_HQD, visible_QK

if TYPE_CHECKING:
    from tracekit.live.run import FullRun
    from tracekit.spec import LayerSpec


class GradedAttention:
    """Attention of the later rows of one layer over all keys, those of earlier rows constant.

    Attributes
    ----------
    shift_HRD
        Zeros that are added to the output: gradients at the output are gradients at these.
    """

    def __init__(self, run: FullRun, first_row: int) -> None:
        self._run, self._first_row = run, first_row
        self.shift_HRD = torch.empty(0)

    def attend(
        self, layer: int, query_BHQD: torch.Tensor, key_BGQD: torch.Tensor, value_BGQD: torch.Tensor
    ) -> torch.Tensor:
        """Return what the model would, and keep where gradients are taken."""
        reference, first = self._run.references[layer], self._first_row
        before = (tensor[..., :first, :] for tensor in (reference.key_LGTD, reference.value_LGTD))
        key_BGKD, value_BGKD = (
            torch.cat([old.to(new), new], dim=-2)
            for old, new in zip(before, (key_BGQD, value_BGQD), strict=True)
        )
        spec = self._run.spec.layers[layer]
        output_BHQD = _attend(spec, query_BHQD, key_BGKD, value_BGKD, first)
        self.shift_HRD = torch.zeros_like(output_BHQD[0]).requires_grad_()
        return output_BHQD + self.shift_HRD


def _attend(
    layer: LayerSpec,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    first_query: int,
) -> torch.Tensor:
    """Return attention outputs [B, H, Q, D'] with a graph: nothing is changed in place."""
    num_queries, num_keys = query_BHQD.shape[-2], key_BGKD.shape[-2]
    seen_QK = visible_QK(
        layer, num_queries, num_keys, first_query=first_query, device=query_BHQD.device
    )
    if layer.softcap is None and layer.sinks is None and layer.alibi is None:
        key_BHKD, value_BHKD = (
            x.repeat_interleave(layer.group_size, dim=1) for x in (key_BGKD, value_BGKD)
        )
        return functional.scaled_dot_product_attention(
            query_BHQD, key_BHKD, value_BHKD, attn_mask=seen_QK, scale=layer.scale
        )
    logits_BHQK = logits_HQK(query_BHQD, key_BGKD, layer).masked_fill(~seen_QK, -torch.inf)
    if layer.sinks is not None:
        sink_H11 = logits_BHQK.new_tensor(layer.sinks)[:, None, None]
        sink_BHQ1 = sink_H11.expand(*logits_BHQK.shape[:-1], 1)
        logits_BHQK = torch.cat([logits_BHQK, sink_BHQ1], dim=-1)
    weights_BHQK = logits_BHQK.softmax(dim=-1)[..., :num_keys]
    return outputs_HQD(weights_BHQK, value_BGKD)
