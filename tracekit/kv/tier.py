"""A slower tier below the cache: entries wait there and come back when a selector wants them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import pad

from tracekit.errors import UsageError
from tracekit.kv.amounts import Amount, Bytes, Frac
from tracekit.kv.order import LOWEST, PLACE_BITS, highest

if TYPE_CHECKING:
    from collections.abc import Callable

_QUARTER = Frac(0.25)


@dataclass(frozen=True)
class Tier:
    """A fast tier of limited size over a slow one that holds everything.

    What a row reads and the fast tier lacks is fetched and stays there; the row's own entry is
    written to both. Then entries leave for the slow tier, which has them already, until the rest
    fits. At the first decision the fast tier holds the newest entries.

    Parameters
    ----------
    fast
        Entries that the fast tier holds in each head, of the tokens seen, rounded down, at least 1.
    replace
        What leaves first: ``lru`` the least recently read, ``lfu`` the least often read since the
        first decision; among equals the oldest.

    Raises
    ------
    UsageError
        If the amount is given in bytes.
    """

    fast: Amount = _QUARTER
    replace: Literal["lru", "lfu"] = "lru"

    def __post_init__(self) -> None:
        if isinstance(self.fast, Bytes):
            msg = "fast is a fraction such as 0.25 or tokens such as 512tok, not bytes."
            raise UsageError(msg)


_WORTH: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "lru": lambda worth_NLGK, read_NLGK, row: worth_NLGK.masked_fill(read_NLGK, row),
    "lfu": lambda worth_NLGK, read_NLGK, row: worth_NLGK + read_NLGK,
}
"""From what entries were worth to what they are after a row was read."""


class FastTier:
    """What the fast tier of each of N policies holds, row after row.

    Parameters
    ----------
    tier
        Its size, and what leaves first.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._fast_NLGK: torch.Tensor | None = None
        self._worth_NLGK: torch.Tensor | None = None

    def read(
        self, read_NLGQK: torch.Tensor, seen_NLGQK: torch.Tensor, first_row: int
    ) -> torch.Tensor:
        """Return how many entries each row fetches, int64 [N, L, G, Q].

        Parameters
        ----------
        read_NLGQK
            bool: what the next rows read.
        seen_NLGQK
            bool: what they could have read; the rest is in no tier.
        first_row
            Position of the first of them.
        """
        fetched: list[torch.Tensor] = []
        fast_NLGK, worth_NLGK = self._grown(read_NLGQK, seen_NLGQK, first_row)
        for number in range(read_NLGQK.shape[3]):
            row = first_row + number
            read_NLGK = read_NLGQK[..., number, :]
            fast_NLGK = fast_NLGK & seen_NLGQK[..., number, :]
            fast_NLGK[..., row] = True
            fetched.append((read_NLGK & ~fast_NLGK).sum(-1))
            worth_NLGK = _WORTH[self._tier.replace](worth_NLGK, read_NLGK, row)
            fast_NLGK = self._shrunk(fast_NLGK | read_NLGK, worth_NLGK, row + 1)
        self._fast_NLGK, self._worth_NLGK = fast_NLGK, worth_NLGK
        return torch.stack(fetched, dim=-1)

    def _grown(
        self, read_NLGQK: torch.Tensor, seen_NLGQK: torch.Tensor, first_row: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state with room for all keys of these rows; at first the newest are fast."""
        num_keys = read_NLGQK.shape[-1]
        position_K = torch.arange(num_keys, device=read_NLGQK.device)
        # Being written is a first touch: worth the same as a read then, but no read to be counted.
        written_K = position_K * (self._tier.replace == "lru")
        if self._fast_NLGK is None or self._worth_NLGK is None:
            here_NLGK = (seen_NLGQK[..., 0, :] & (position_K < first_row)).expand_as(
                read_NLGQK[..., 0, :]
            )
            fast_NLGK = self._shrunk(here_NLGK, position_K.expand_as(here_NLGK), first_row)
            return fast_NLGK, written_K.expand_as(here_NLGK)
        fast_NLGK = pad(self._fast_NLGK, (0, num_keys - self._fast_NLGK.shape[-1]))
        written_NLGK = written_K[self._worth_NLGK.shape[-1] :].expand(*fast_NLGK.shape[:3], -1)
        return fast_NLGK, torch.cat([self._worth_NLGK, written_NLGK], dim=-1)

    def _shrunk(
        self, fast_NLGK: torch.Tensor, worth_NLGK: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return what stays: the entries of most worth, among equals the more recent."""
        capacity = max(1, self._tier.fast.of(num_tokens))
        over_NLG = (fast_NLGK.sum(-1) - capacity).clamp(min=0)
        position_K = torch.arange(fast_NLGK.shape[-1], device=fast_NLGK.device)
        leaves_first_NLGK = (-((worth_NLGK << PLACE_BITS) + position_K)).where(fast_NLGK, LOWEST)
        return fast_NLGK & ~highest(leaves_first_NLGK, over_NLG)
