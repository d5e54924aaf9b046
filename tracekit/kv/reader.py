"""Reads rows over what is there: entries as they are stored, of which a selector may choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.kv.attend import row_blocks, seen_weights
from tracekit.kv.choose import Chooser
from tracekit.kv.rows import Rows
from tracekit.kv.storage import Storage
from tracekit.kv.tier import FastTier
from tracekit.measure.attention import as_wide, logits_HQK, visible_QK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.spec import LayerSpec, RopeSpec


class Outcome(NamedTuple):
    """Some rows after they were read.

    Parameters
    ----------
    weights_LGNMQK
        Attention over the keys up to the last of these rows.
    seen_NLGQK
        bool: entries that each row read.
    fetched_NLGQ
        int64: entries of these that came from the slow tier; 0 without a tier.
    """

    weights_LGNMQK: torch.Tensor
    seen_NLGQK: torch.Tensor
    fetched_NLGQ: torch.Tensor

    @property
    def rows(self) -> range:
        """Positions of the rows."""
        num_rows, end = self.weights_LGNMQK.shape[-2:]
        return range(end - num_rows, end)


class Reader:
    """Queries, entries and what chooses among them, for N policies of one family.

    Parameters
    ----------
    policies
        N policies that differ in their amount alone.
    layer
        The spec that the layers share.
    rope
        Rotary embedding of the layers; None if they have none.
    """

    def __init__(self, policies: Sequence[Policy], layer: LayerSpec, rope: RopeSpec | None) -> None:
        tier = policies[0].tier
        self._layer = layer
        self._query = Rows()
        self.storage = Storage(policies[0], rope)
        self.chooser = Chooser(policies, layer)
        self._fast_tier = None if tier is None else FastTier(tier)

    @property
    def query_LHTD(self) -> torch.Tensor:
        """Queries of all rows so far."""
        return self._query.all

    def append(
        self, query_LHQD: torch.Tensor, key_LGQD: torch.Tensor, value_LGQD: torch.Tensor
    ) -> None:
        """Take the next rows; half precision is read as float32."""
        self._query.append(as_wide(query_LHQD))
        self.storage.append(as_wide(key_LGQD), as_wide(value_LGQD))

    def read(self, num_rows: int, stays_NLGK: torch.Tensor, *, chooses: bool) -> Iterator[Outcome]:
        """Yield the attention of the newest rows, in blocks of bounded size.

        Parameters
        ----------
        num_rows
            How many.
        stays_NLGK
            bool: entries that were not evicted, inside the window or not.
        chooses
            Whether selectors and tiers are at work: from the first decision on.
        """
        num_tokens, key_LGKD = stays_NLGK.shape[-1], self.storage.key_LGKD
        num_sets = max(len(stays_NLGK), self.chooser.num_sets)
        heads = self.query_LHTD.shape[:2].numel()
        row_bytes = num_sets * key_LGKD.element_size() * num_tokens * heads
        for start, end in row_blocks(num_tokens - num_rows, num_tokens, row_bytes):
            here_NLGK, device = stays_NLGK[..., :end], key_LGKD.device
            seen_QK = visible_QK(self._layer, end - start, end, first_query=start, device=device)
            seen_NLGQK = here_NLGK[..., None, :] & seen_QK
            fetched_NLGQ = seen_NLGQK.new_zeros(seen_NLGQK.shape[:-1], dtype=torch.int64)
            if chooses:
                visible_NLGQK = seen_NLGQK
                seen_NLGQK = self.chooser.choose(
                    self.query_LHTD, key_LGKD, here_NLGK, visible_NLGQK, start
                )
                if self._fast_tier is not None:
                    fetched_NLGQ = self._fast_tier.read(seen_NLGQK, visible_NLGQK, start)
            query_LHQD = self.query_LHTD[..., start:end, :]
            logits_LHQK = logits_HQK(query_LHQD, key_LGKD[..., :end, :], self._layer)
            weights_LGNMQK = seen_weights(logits_LHQK, seen_NLGQK, self._layer)
            yield Outcome(weights_LGNMQK, seen_NLGQK, fetched_NLGQ)
