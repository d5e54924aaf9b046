"""How many entries rows had before them: held, read, fetched from a slow tier, stored transformed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from tracekit.kv.engine import NEVER
from tracekit.kv.measures import count_seen

if TYPE_CHECKING:
    from tracekit.kv.engine import Engine
    from tracekit.kv.reader import Outcome
    from tracekit.spec import LayerSpec

A = TypeVar("A")
"""Tensors while rows are read, numpy arrays in the end."""


class Entries(NamedTuple, Generic[A]):
    """Counts at each of R rows of a KV head, int64 [N, L, G, R]; see ``Measures``."""

    held_NLGR: A
    read_NLGR: A
    fetched_NLGR: A
    closed_NLGR: A


def count_entries(engine: Engine, outcome: Outcome) -> Entries[torch.Tensor]:
    """Return the counts of the newest rows that an engine has read.

    Parameters
    ----------
    engine
        After reading them.
    outcome
        How it came about.
    """
    num_keys, num_rows = outcome.weights_LGNMQK.shape[-1], len(outcome.rows)
    stays_NLGK = engine.evicted_at_NLGK[..., :num_keys] == NEVER
    held_NLGR = count_seen(stays_NLGK, engine.layer, num_rows)
    closed_NLGK = stays_NLGK & engine.closed_LGK[..., :num_keys]
    is_plain = engine.policy.is_plain
    counts = Entries(
        held_NLGR=held_NLGR,
        read_NLGR=held_NLGR if is_plain else outcome.seen_NLGQK.sum(-1),
        fetched_NLGR=outcome.fetched_NLGQ,
        closed_NLGR=count_seen(closed_NLGK, engine.layer, num_rows),
    )
    most = max(len(one) for one in counts)
    return Entries(*(one.expand(most, -1, -1, -1) for one in counts))


def entries_of_history(
    evicted_at_NLGK: torch.Tensor, layer: LayerSpec, num_rows: int
) -> Entries[torch.Tensor]:
    """Return the counts of the last rows where all that is held is read, as it was written.

    Parameters
    ----------
    evicted_at_NLGK
        Tokens seen when an entry was evicted, ``engine.NEVER`` if it stayed: all that a plain
        policy did.
    layer
        Its window.
    num_rows
        R.
    """
    num_keys, device = evicted_at_NLGK.shape[-1], evicted_at_NLGK.device
    position_K = torch.arange(num_keys, device=device)
    gone_at_NLGK = evicted_at_NLGK.long()
    if layer.window is not None:
        gone_at_NLGK = gone_at_NLGK.minimum(position_K + layer.window)
    # An entry that leaves at t is last read by row t - 1: count those that have come, less those
    # that have gone.
    flat_XK = gone_at_NLGK.clamp(max=num_keys).flatten(0, -2)
    gone_XK = torch.zeros(len(flat_XK), num_keys + 1, dtype=torch.int64, device=device)
    gone_XK.scatter_add_(1, flat_XK, torch.ones_like(flat_XK))
    held_XK = position_K + 1 - gone_XK[:, :-1].cumsum(1)
    held_NLGR = held_XK[:, num_keys - num_rows :].reshape(*evicted_at_NLGK.shape[:-1], num_rows)
    zero = torch.zeros_like(held_NLGR)
    return Entries(held_NLGR, held_NLGR, zero, zero)
