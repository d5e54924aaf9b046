"""Rows over what is held, gathered: where little is held, little is read.

The engine's other way masks what is gone; here the entries that each KV head holds are brought
together first. Both are the same attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.kv.attend import row_blocks
from tracekit.kv.packed import cache_order
from tracekit.measure.attention import weights_HQK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.spec import LayerSpec

COPY_COST = 8
"""Rows for which entries that are held are passed over in the time in which one is moved."""

NOWHERE = torch.iinfo(torch.int64).max
"""Position of a place that holds no entry: no row sees it."""


class Gathered(NamedTuple):
    """Entries that the KV heads of a stack hold, at C places, of which some may be empty.

    Parameters
    ----------
    key_LGCD, value_LGCD
        Entries, in the order of the text.
    position_LGC
        Their positions, int64; ``NOWHERE`` where there is none.
    """

    key_LGCD: torch.Tensor
    value_LGCD: torch.Tensor
    position_LGC: torch.Tensor


def gathered(
    key_LGKD: torch.Tensor, value_LGKD: torch.Tensor, held_LGK: torch.Tensor, rows_HQ: Sequence[int]
) -> Gathered:
    """Return what is held; brought together where that costs less than passing over the rest.

    Parameters
    ----------
    key_LGKD, value_LGKD
        All entries.
    held_LGK
        bool.
    rows_HQ
        Query heads and rows that are to read them.
    """
    count_LG = held_LGK.sum(-1)
    most, num_keys = int(count_LG.max()), held_LGK.shape[-1]
    position_K = torch.arange(num_keys, device=held_LGK.device)
    rows_a_head = rows_HQ[0] * rows_HQ[1] // held_LGK.shape[1]
    # Bringing an entry together moves as many numbers as a row reads of it, written once more.
    if rows_a_head * (num_keys - most) < COPY_COST * most:
        position_LGK = position_K.where(held_LGK, NOWHERE)
        return Gathered(key_LGKD, value_LGKD, position_LGK)
    index_LGC = cache_order(held_LGK)[..., :most]
    position_LGC = index_LGC.masked_fill(position_K[:most] >= count_LG[..., None], NOWHERE)
    at_LGC1 = index_LGC[..., None]
    return Gathered(
        key_LGKD.gather(2, at_LGC1.expand(-1, -1, -1, key_LGKD.shape[-1])),
        value_LGKD.gather(2, at_LGC1.expand(-1, -1, -1, value_LGKD.shape[-1])),
        position_LGC,
    )


def gathered_rows(
    query_LHQD: torch.Tensor, entries: Gathered, first_row: int, layer: LayerSpec
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield attention weights of rows over gathered entries, in blocks of bounded size.

    Parameters
    ----------
    query_LHQD
        Queries of Q rows.
    entries
        What they read; a row sees those up to its own position that its window holds.
    first_row
        Position of the first row.
    layer
        The spec that the layers share.

    Yields
    ------
    tuple
        Number of the first row of a block, and weights [L, G, M, rows, C].
    """
    num_heads, num_rows = query_LHQD.shape[1:3]
    key_LGCD, position_LGC = entries.key_LGCD, entries.position_LGC[:, :, None, None]
    row_bytes = len(key_LGCD) * num_heads * key_LGCD.shape[2] * key_LGCD.element_size()
    for start, end in row_blocks(0, num_rows, row_bytes):
        row_Q1 = torch.arange(first_row + start, first_row + end, device=key_LGCD.device)[:, None]
        seen_LGMQC = position_LGC <= row_Q1
        if layer.window is not None:
            seen_LGMQC &= position_LGC > row_Q1 - layer.window
        packed = (query_LHQD[:, :, start:end] * layer.scale).unflatten(1, (layer.num_kv_heads, -1))
        logits = (packed.flatten(2, 3) @ key_LGCD.transpose(-1, -2)).unflatten(2, packed.shape[2:4])
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        if layer.alibi is not None:
            slope = logits.new_tensor(layer.alibi).reshape(layer.num_kv_heads, -1, 1, 1)
            logits = logits + slope * position_LGC.where(position_LGC < NOWHERE, 0)
        logits = logits.masked_fill_(~seen_LGMQC, -torch.inf)
        yield start, _weights(logits, layer)


def _weights(logits_LGMQC: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """Return the softmax of rows of which each sees something: itself."""
    if layer.sinks is None:
        return logits_LGMQC.softmax(dim=-1)
    shape, weights_LHQC = logits_LGMQC.shape, weights_HQK(logits_LGMQC.flatten(1, 2), layer)
    return weights_LHQC.reshape(shape)
