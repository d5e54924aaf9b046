"""Attention as the kernel computes it: scale, soft-cap, ALiBi, causal and window masks, sinks.

One implementation for the recorder's statistics, its self-check and the KV engine, so that all of
them mean the same attention. Leading axes (layers, kept fractions) are carried along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec


def visible_QK(
    layer: LayerSpec,
    num_queries: int,
    num_keys: int,
    *,
    first_query: int,
    first_key: int = 0,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return which keys each query may see: not later than itself, and inside the layer's window.

    Parameters
    ----------
    layer
        Its ``window`` counts the query's own position.
    num_queries, num_keys
        Q and K.
    first_query, first_key
        Positions of the first query and of the first key.
    device
        Where to put the mask.

    Returns
    -------
    Tensor
        bool [Q, K].
    """
    query_Q1 = torch.arange(first_query, first_query + num_queries, device=device)[:, None]
    key_1K = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    seen_QK = key_1K <= query_Q1
    if layer.window is not None:
        seen_QK &= key_1K > query_Q1 - layer.window
    return seen_QK


def logits_HQK(query_HQD: torch.Tensor, key_GKD: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """Return attention logits before any mask: soft-cap(scale * q k) + ALiBi's slope * position.

    Parameters
    ----------
    query_HQD
        Post-RoPE queries [..., H, Q, D]; half precision is read as float32, float64 is kept.
    key_GKD
        Post-RoPE keys [..., G, K, D]; query head h reads KV head h // (H / G).
    layer
        Gives ``scale``, ``softcap`` and ``alibi``; with slopes, keys must follow one another without
        a gap. Their positions count from the first key given: softmax does not see where they start.

    Returns
    -------
    Tensor
        [..., H, Q, K], float32 or float64.
    """
    query_HQD, key_GKD = as_wide(query_HQD), as_wide(key_GKD)
    *lead, num_heads, num_queries, size = query_HQD.shape
    num_kv_heads, num_keys = key_GKD.shape[-3], key_GKD.shape[-2]
    packed = (query_HQD * layer.scale).reshape(*lead, num_kv_heads, -1, size)
    scores = (packed @ key_GKD.transpose(-1, -2)).reshape(*lead, num_heads, num_queries, num_keys)
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if layer.alibi is not None:
        position_K = torch.arange(num_keys, device=scores.device)
        scores += scores.new_tensor(layer.alibi)[:, None, None] * position_K
    return scores


def weights_HQK(scores_HQK: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """Return the softmax over keys of masked logits, the layer's sink logits in the denominator.

    Parameters
    ----------
    scores_HQK
        [..., H, Q, K], -inf where a key is not seen.
    layer
        Gives ``sinks``; with sinks a row sums to less than 1, the rest is the sink's.

    Returns
    -------
    Tensor
        [..., H, Q, K]; a row that sees no key at all is 0, not NaN.
    """
    peak = scores_HQK.amax(dim=-1, keepdim=True)
    if layer.sinks is not None:
        sink_H11 = scores_HQK.new_tensor(layer.sinks)[:, None, None]
        peak = torch.maximum(peak, sink_H11)
    peak = peak.clamp_min(torch.finfo(scores_HQK.dtype).min)
    weights = (scores_HQK - peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if layer.sinks is not None:
        total = total + (sink_H11 - peak).exp()
    return weights.div_(total.clamp_min(torch.finfo(scores_HQK.dtype).tiny))


def outputs_HQD(weights: torch.Tensor, value_GKD: torch.Tensor) -> torch.Tensor:
    """Return attention outputs: weights [..., H, Q, K] times values [..., G, K, D]."""
    value_GKD = as_wide(value_GKD)
    *lead, num_heads, num_queries, num_keys = weights.shape
    num_kv_heads, size = value_GKD.shape[-3], value_GKD.shape[-1]
    packed = weights.reshape(*lead, num_kv_heads, -1, num_keys) @ value_GKD
    return packed.reshape(*lead, num_heads, num_queries, size)


def as_wide(array: torch.Tensor) -> torch.Tensor:
    """Return float64 as it is and everything else as float32."""
    return array if array.dtype == torch.float64 else array.float()
