"""Layers that read another layer's keys: what its cache held at each row, they read as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracekit.kv.attend import row_blocks
from tracekit.measure.attention import as_wide, logits_HQK, outputs_HQD, visible_QK, weights_HQK

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec


def attend_held(
    query_LHQD: torch.Tensor,
    key_LGKD: torch.Tensor,
    value_LGKD: torch.Tensor,
    evicted_at_LGK: torch.Tensor,
    layer: LayerSpec,
) -> torch.Tensor:
    """Return attention outputs [L, H, Q, D] of the newest rows over what was there at each of them.

    Parameters
    ----------
    query_LHQD
        Queries of the Q newest rows.
    key_LGKD, value_LGKD
        All entries.
    evicted_at_LGK
        Tokens seen when an entry was evicted; a row at that position reads it no more.
    layer
        The spec of the layers that attend.
    """
    num_layers, num_heads, num_rows, _ = query_LHQD.shape
    num_keys = key_LGKD.shape[2]
    first_row, query_LHQD = num_keys - num_rows, as_wide(query_LHQD)
    parts = []
    row_bytes = num_layers * num_heads * num_keys * query_LHQD.element_size()
    for start, end in row_blocks(0, num_rows, row_bytes):
        stop = first_row + end
        seen_QK = visible_QK(
            layer, end - start, stop, first_query=first_row + start, device=query_LHQD.device
        )
        row_Q1 = torch.arange(first_row + start, stop, device=query_LHQD.device)[:, None]
        seen_LGQK = seen_QK & (evicted_at_LGK[..., None, :stop] > row_Q1)
        logits_LHQK = logits_HQK(query_LHQD[:, :, start:end], key_LGKD[:, :, :stop], layer)
        unseen_LHQK = ~seen_LGQK.repeat_interleave(layer.group_size, dim=1)
        weights_LHQK = weights_HQK(logits_LHQK.masked_fill(unseen_LHQK, -torch.inf), layer)
        parts.append(outputs_HQD(weights_LHQK, value_LGKD[:, :, :stop]))
    return torch.cat(parts, dim=-2)
