"""Where a recording goes and what of it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tracekit.measure.head import Head
    from tracekit.record.attention_stats import Wanted
    from tracekit.record.outbox import Outbox
    from tracekit.record.transfer import Transfer
    from tracekit.trace.writer import TraceWriter


@dataclass(frozen=True, kw_only=True)
class Store:
    """Where a recording goes and what of it is kept: the same for all its sequences.

    Parameters
    ----------
    writer
        The open trace; touched by the outbox's thread alone.
    outbox
        Does the writing.
    transfer
        Brings tensors to memory.
    head
        The language-model head.
    num_tokens
        Entries of the tokenizer.
    with_attention, with_tensors
        What the capture level asks for: statistics of attention, with final hidden states; queries,
        keys and values.
    wanted
        What is kept of attention rows beside their statistics.
    residual_layers
        Layers whose outgoing hidden states are kept.
    dtype
        Type in which tensors are stored; None: as computed.
    """

    writer: TraceWriter
    outbox: Outbox
    transfer: Transfer
    head: Head
    num_tokens: int
    with_attention: bool
    with_tensors: bool
    wanted: Wanted
    residual_layers: tuple[int, ...]
    dtype: torch.dtype | None
