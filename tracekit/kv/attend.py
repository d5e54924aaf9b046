"""Attention of one set of rows under N sets of kept keys at once, and blocks of bounded size.

N kept sets are N times as many query heads of the same KV head: scores and values are shared, and
one softmax and one product do them all. Axes inside: [L, G, N, M, Q, K].
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tracekit.measure.attention import outputs_HQD, weights_HQK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.spec import LayerSpec

BLOCK_BYTES = 8 << 20
"""Attention weights that are in memory at once; larger blocks leave the processor's caches."""


def seen_weights(
    logits_LHQK: torch.Tensor, seen_NLGQK: torch.Tensor, layer: LayerSpec
) -> torch.Tensor:
    """Return attention weights over the keys that each row sees, for N kept sets.

    Parameters
    ----------
    logits_LHQK
        Logits of all keys, shared by the N sets.
    seen_NLGQK
        bool; the query heads of a KV head see the same keys.
    layer
        Gives sink logits.

    Returns
    -------
    Tensor
        [L, G, N, M, Q, K].
    """
    num_layers, num_heads, num_queries, num_keys = logits_LHQK.shape
    num_sets, _, num_kv_heads = seen_NLGQK.shape[:3]
    group = num_heads // num_kv_heads
    grouped = logits_LHQK.reshape(num_layers, num_kv_heads, 1, group, num_queries, num_keys)
    seen = seen_NLGQK.permute(1, 2, 0, 3, 4)[:, :, :, None]
    masked = torch.where(seen, grouped, -torch.inf)
    shape = masked.shape
    if layer.sinks is not None:
        sink_G1M = torch.tensor(layer.sinks, dtype=torch.float64).reshape(num_kv_heads, 1, group)
        sinks = sink_G1M.expand(-1, num_sets, -1).flatten().tolist()
        layer = replace(layer, sinks=tuple(sinks))
    flat = masked.reshape(num_layers, -1, num_queries, num_keys)
    return weights_HQK(flat, layer).reshape(shape)


def seen_outputs(weights_LGNMQK: torch.Tensor, value_LGKD: torch.Tensor) -> torch.Tensor:
    """Return attention outputs.

    Parameters
    ----------
    weights_LGNMQK
        What ``seen_weights`` gives.
    value_LGKD
        Values, float32 or float64.

    Returns
    -------
    Tensor
        [N, L, H, Q, D], of the values' type.
    """
    shape = weights_LGNMQK.shape
    flat = weights_LGNMQK.reshape(shape[0], -1, *shape[4:])
    output = outputs_HQD(flat, value_LGKD)
    return to_heads(output.reshape(*shape[:5], -1))


def to_heads(array_LGNMX: torch.Tensor) -> torch.Tensor:
    """Return [L, G, N, M, ...] as [N, L, H, ...]."""
    return array_LGNMX.movedim(2, 0).flatten(2, 3)


def row_blocks(start: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of blocks of rows of at most ``BLOCK_BYTES``, at least one row.

    Parameters
    ----------
    start, end
        First row, and last + 1.
    row_bytes
        Bytes that a row takes, above 0.
    """
    size = max(1, BLOCK_BYTES // row_bytes)
    for first in range(start, end, size):
        yield first, min(first + size, end)
