"""What is summed up over the rows as they are read: what a key has received, how often, since when.

A scorer declares accumulators; the engine feeds them the attention weights of each row once, as
that layer computed them over what it then held. A scorer may bring one of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from tracekit.kv.attend import to_heads

Reduce = Literal["mean", "max", "sum"]
"""How numbers of the query heads that share a KV head become one."""


@dataclass(frozen=True)
class Accumulator(ABC):
    """A number for each key of each head that only ever grows with the rows."""

    by_query_head: ClassVar[bool] = False
    """Whether there is one a query head, or one a KV head."""
    bytes_per_head: ClassVar[int] = 4
    """Bytes that a real implementation keeps of it for each entry, of a KV or query head."""

    def factor(self, group_size: int) -> float | None:
        """Return f if all that counts is f times the attention received from a group's heads.

        A sum can then be taken without the weights of each row; None if they are needed.
        """
        del group_size
        return None

    @abstractmethod
    def add(
        self, state_NLXK: torch.Tensor, weights_LGNMQK: torch.Tensor, first_row: int
    ) -> torch.Tensor:
        """Return the state with some rows taken in.

        Parameters
        ----------
        state_NLXK
            0 for a key that no row has seen; X is H or G. May be written to.
        weights_LGNMQK
            Attention weights of Q rows over K keys, 0 where a key is not seen.
        first_row
            Position of the first of them.
        """


@dataclass(frozen=True)
class Received(Accumulator):
    """Attention received by each key of a KV head.

    Parameters
    ----------
    reduce
        How each row's attention is reduced over the query heads of the KV head before it is summed.
    """

    reduce: Reduce = "mean"

    def factor(self, group_size: int) -> float | None:
        """Return 1 for sums and one over the heads for means; a maximum needs the weights."""
        return {"mean": 1 / group_size, "sum": 1.0, "max": None}[self.reduce]

    def add(
        self, state_NLXK: torch.Tensor, weights_LGNMQK: torch.Tensor, first_row: int
    ) -> torch.Tensor:
        """Add the rows' attention."""
        del first_row
        return state_NLXK.add_(_RECEIVED[self.reduce](weights_LGNMQK).permute(2, 0, 1, 3))


@dataclass(frozen=True)
class ReceivedByHead(Accumulator):
    """Attention received by each key, for each query head."""

    by_query_head: ClassVar = True

    def add(
        self, state_NLXK: torch.Tensor, weights_LGNMQK: torch.Tensor, first_row: int
    ) -> torch.Tensor:
        """Add the rows' attention."""
        del first_row
        return state_NLXK.add_(to_heads(weights_LGNMQK.sum(4)))


@dataclass(frozen=True)
class Reads(Accumulator):
    """Rows that read a key: attention above an even share, 1 / (position + 1), in any query head."""

    def add(
        self, state_NLXK: torch.Tensor, weights_LGNMQK: torch.Tensor, first_row: int
    ) -> torch.Tensor:
        """Count the rows that read each key."""
        read_LGNQK = is_read(weights_LGNMQK, first_row)
        return state_NLXK.add_(read_LGNQK.sum(3).permute(2, 0, 1, 3))


@dataclass(frozen=True)
class LastRead(Accumulator):
    """1 + position of the last row that read a key, as ``Reads`` counts them; 0 if none did."""

    def add(
        self, state_NLXK: torch.Tensor, weights_LGNMQK: torch.Tensor, first_row: int
    ) -> torch.Tensor:
        """Note the last row of these that read each key."""
        read_LGNQK = is_read(weights_LGNMQK, first_row)
        end_Q1 = (
            first_row + 1 + torch.arange(read_LGNQK.shape[3], device=read_LGNQK.device)[:, None]
        )
        last_LGNK = (read_LGNQK * end_Q1).amax(3)
        return torch.maximum(state_NLXK, last_LGNK.permute(2, 0, 1, 3).to(state_NLXK))


ROUNDING = 1e-6
"""Part of an even share by which attention must exceed it: an even row is no read by rounding."""


def is_read(weights_LGNMQK: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return what is read: more attention than an even share in at least one query head.

    Parameters
    ----------
    weights_LGNMQK
        Attention weights of Q rows.
    first_row
        Position of the first of them: the row at t may see t + 1 keys.

    Returns
    -------
    Tensor
        bool [L, G, N, Q, K].
    """
    num_rows = weights_LGNMQK.shape[4]
    seen_Q1 = first_row + 1 + torch.arange(num_rows, device=weights_LGNMQK.device)[:, None]
    return weights_LGNMQK.amax(3) * seen_Q1 > 1 + ROUNDING


_RECEIVED = {
    "mean": lambda weights: weights.mean(3).sum(3),
    "sum": lambda weights: weights.sum((3, 4)),
    "max": lambda weights: weights.amax(3).sum(3),
}
"""From weights [L, G, N, M, Q, K] to what each key received, [L, G, N, K]."""
