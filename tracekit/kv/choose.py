"""Asks the selectors of N policies what each row reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracekit.errors import UsageError
from tracekit.kv.selector import Choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.policy import Policy
    from tracekit.spec import LayerSpec


class Chooser:
    """The selector that N policies share, each with an amount of its own.

    Parameters
    ----------
    policies
        N policies of one family.
    layer
        The spec that the layers share.
    """

    def __init__(self, policies: Sequence[Policy], layer: LayerSpec) -> None:
        self._selectors = [one.selector for one in policies if one.selector is not None]
        self._layer = layer

    @property
    def num_sets(self) -> int:
        """Sets that are chosen: N, or 1 if there is no selector."""
        return len(self._selectors) or 1

    def choose(
        self,
        query_LHTD: torch.Tensor,
        key_LGKD: torch.Tensor,
        held_NLGK: torch.Tensor,
        seen_NLGQK: torch.Tensor,
        first_row: int,
    ) -> torch.Tensor:
        """Return what rows read, bool [N, L, G, Q, K]; all that they see without a selector.

        Parameters
        ----------
        query_LHTD
            Queries of all rows so far.
        key_LGKD
            Keys as attention reads them, at least up to the last of the rows.
        held_NLGK, seen_NLGQK
            What is there, and what each row may see of it.
        first_row
            Position of the first of the rows.
        """
        if not self._selectors:
            return seen_NLGQK
        num_rows, num_keys = seen_NLGQK.shape[-2:]
        end, device = first_row + num_rows, seen_NLGQK.device
        before_LHQD = query_LHTD[..., max(0, first_row - 1) : end - 1, :]
        if first_row == 0:
            before_LHQD = torch.nn.functional.pad(before_LHQD, (0, 0, 1, 0))
        choice = Choice(
            layer=self._layer,
            query_LHQD=query_LHTD[..., first_row:end, :],
            query_before_LHQD=before_LHQD,
            key_LGKD=key_LGKD[..., :num_keys, :],
            held_NLGK=held_NLGK.expand(self.num_sets, -1, -1, -1),
            seen_NLGQK=seen_NLGQK.expand(self.num_sets, -1, -1, -1, -1),
            budget_NQ=torch.tensor(
                [[self._budget(n, seen + 1) for seen in range(first_row, end)] for n in self._all()],
                device=device,
            ),
            first_row=first_row,
        )
        return self._selectors[0].choose(choice) & choice.seen_NLGQK

    def _all(self) -> range:
        return range(self.num_sets)

    def _budget(self, n: int, num_tokens: int) -> int:
        read = self._selectors[n].read
        if read is None:
            msg = "a selector has no amount: say how much is read, as in +quest:read=0.1."
            raise UsageError(msg)
        return max(1, read.of(num_tokens))
