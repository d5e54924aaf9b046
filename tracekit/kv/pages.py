"""Held entries in pages of the cache, and what is noted of each page when it is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.kv.attend import BLOCK_BYTES

if TYPE_CHECKING:
    from tracekit.kv.selector import Fitted, Selector


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """Pages as some rows see them: P pages that may be full, and those that are still open.

    A page is that many entries which follow one another in the cache: in an order from which
    evicted entries are gone. Entries that left a layer's window keep their place.

    Parameters
    ----------
    size
        Entries of a page.
    page_NLGK
        int64, the page of each held entry; any number where none is held.
    own_NLGQ
        int64, the page of each row's own entry.
    filled_NLGQ
        int64, entries of that page up to the row.
    first_NLGQ
        int64, the first page with an entry inside the window of the row.
    summary
        What was noted, each tensor [N, L, G, P, ...]; any number for a page that is not full.
    """

    size: int
    page_NLGK: torch.Tensor
    own_NLGQ: torch.Tensor
    filled_NLGQ: torch.Tensor
    first_NLGQ: torch.Tensor
    summary: Fitted

    @property
    def candidates_NLGQP(self) -> torch.Tensor:
        """bool: full pages before the row's own, inside its window; no later entry is in them."""
        num_pages = self.summary[0].shape[3]
        page_P = torch.arange(num_pages, device=self.own_NLGQ.device)
        after = page_P >= self.first_NLGQ[..., None]
        return after & (page_P < self.own_NLGQ[..., None])

    def others_NLGQ(self, budget_NQ: torch.Tensor) -> torch.Tensor:
        """Return int64: whole pages that may be read beside the row's own, of so many entries."""
        return (budget_NQ[:, None, None] - self.filled_NLGQ).clamp(min=0) // self.size

    def entries(self, chosen_NLGQP: torch.Tensor) -> torch.Tensor:
        """Return bool [N, L, G, Q, K]: entries of chosen pages and of the rows' own."""
        num_pages = chosen_NLGQP.shape[-1] + 1
        page_P = torch.arange(num_pages, device=chosen_NLGQP.device)
        read_NLGQP = pad(chosen_NLGQP, (0, 1)) | (page_P == self.own_NLGQ[..., None])
        page_NLG1K = self.page_NLGK.clamp(0, num_pages - 1)[..., None, :]
        return read_NLGQP.gather(-1, page_NLG1K.expand(*read_NLGQP.shape[:4], -1))


def products_NLGMQP(query_LGMQE: torch.Tensor, noted_NLGPE: torch.Tensor) -> torch.Tensor:
    """Return the products of queries with what was noted of pages of their KV head."""
    packed_NLGXP = query_LGMQE.flatten(2, 3) @ noted_NLGPE.transpose(-1, -2)
    shape = packed_NLGXP.shape
    return packed_NLGXP.reshape(*shape[:3], *query_LGMQE.shape[2:4], shape[-1])


class Binder:
    """Keeps pages from call to call: what is noted of a full page stays until the next decision.

    Parameters
    ----------
    selector
        Gives the size of pages and what is noted of them.
    window
        Of the layers; None if there is none.
    """

    def __init__(self, selector: Selector, window: int | None) -> None:
        self._selector, self._window = selector, window
        self._summary: list[torch.Tensor] = []
        self._num_full_NLG: torch.Tensor | None = None

    def forget(self) -> None:
        """Start anew: entries have left, those behind them move up."""
        self._summary, self._num_full_NLG = [], None

    def pages(self, held_NLGK: torch.Tensor, key_LGKD: torch.Tensor, first_row: int) -> Pages:
        """Return the pages as the rows from ``first_row`` to the last key see them.

        Parameters
        ----------
        held_NLGK
            bool: not evicted, inside the window or not.
        key_LGKD
            Keys as attention reads them.
        first_row
            Position of the first row; all rows hold their own entry.
        """
        size = self._selector.page_size
        count_NLGK = held_NLGK.cumsum(-1)
        self._extend(held_NLGK, key_LGKD, count_NLGK[..., -1])
        rank_NLGQ = count_NLGK[..., first_row:] - 1
        gone_NLGQ = torch.zeros_like(rank_NLGQ)
        if self._window is not None:
            before_NLGK = pad(count_NLGK, (self._window, 0))[..., : held_NLGK.shape[-1]]
            gone_NLGQ = before_NLGK[..., first_row:]
        return Pages(
            size=size,
            page_NLGK=(count_NLGK - 1) // size,
            own_NLGQ=rank_NLGQ // size,
            filled_NLGQ=rank_NLGQ % size + 1,
            first_NLGQ=gone_NLGQ // size,
            summary=tuple(self._summary),
        )

    def _extend(
        self, held_NLGK: torch.Tensor, key_LGKD: torch.Tensor, num_held_NLG: torch.Tensor
    ) -> None:
        """Note what is to be noted of pages that have become full."""
        num_full_NLG = num_held_NLG // self._selector.page_size
        known_NLG = torch.zeros_like(num_full_NLG)
        if self._num_full_NLG is not None:
            known_NLG = self._num_full_NLG
            if torch.equal(known_NLG, num_full_NLG):
                return
        page_P = torch.arange(int(num_full_NLG.max()), device=held_NLGK.device)
        new_NLGP = (page_P >= known_NLG[..., None]) & (page_P < num_full_NLG[..., None])
        rows = self._summarise(new_NLGP, held_NLGK, key_LGKD, num_held_NLG)
        if not self._summary:
            shape = new_NLGP.shape
            self._summary = [row.new_zeros(*shape, *row.shape[1:]) for row in rows]
        for number, (old, row) in enumerate(zip(self._summary, rows, strict=True)):
            room = (0, 0) * (row.dim() - 1) + (0, len(page_P) - old.shape[3])
            grown = pad(old, room)
            grown[new_NLGP] = row
            self._summary[number] = grown
        self._num_full_NLG = num_full_NLG

    def _summarise(
        self,
        new_NLGP: torch.Tensor,
        held_NLGK: torch.Tensor,
        key_LGKD: torch.Tensor,
        num_held_NLG: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return what is noted of the pages marked, each tensor [pages, ...]."""
        size, num_heads = self._selector.page_size, key_LGKD.shape[:2].numel()
        entry_E = held_NLGK.flatten().nonzero()[:, 0]  # of all heads, one after the other
        start_NLG = (num_held_NLG.flatten().cumsum(0) - num_held_NLG.flatten()).view_as(
            num_held_NLG
        )
        number_X4 = new_NLGP.nonzero()
        n, at, head, page = number_X4.unbind(1)
        place_X = start_NLG[n, at, head] + size * page
        place_XC = place_X[:, None] + torch.arange(size, device=place_X.device)
        position_XC = entry_E[place_XC] % held_NLGK.shape[-1]
        head_X = at * key_LGKD.shape[1] + head
        key_XKD = key_LGKD.reshape(num_heads, *key_LGKD.shape[2:])
        most = max(1, BLOCK_BYTES // (size * key_LGKD.shape[-1] * key_LGKD.element_size()))
        parts = [
            self._selector.summarise(key_XKD[heads[:, None], positions])
            for heads, positions in zip(head_X.split(most), position_XC.split(most), strict=True)
        ]
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
