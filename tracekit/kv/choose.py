"""Asks the selectors of N policies what each row reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.errors import UsageError
from tracekit.kv.pages import Binder
from tracekit.kv.scorer import Needs
from tracekit.kv.selector import Choice, Selector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.selector import Fitted
    from tracekit.kv.view import View
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
        self._binders = [Binder(one, layer.window) for one in self._selectors[:1]]
        self._fitted: Fitted = ()

    @property
    def num_sets(self) -> int:
        """Sets that are chosen: N, or 1 if there is no selector."""
        return len(self._selectors) or 1

    @property
    def needs(self) -> Needs:
        """What is read at the first decision."""
        return self._selectors[0].needs if self._selectors else Needs()

    def fit(self, view: View) -> None:
        """Let the selector learn what it needs, at the first decision."""
        for selector in self._selectors[:1]:
            self._fitted = selector.fit(view)

    def decided(self) -> None:
        """Take notice of a decision: pages change."""
        for binder in self._binders:
            binder.forget()

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
        if bool((held_NLGK == held_NLGK[:1]).all()):  # one search then serves all N amounts
            held_NLGK, seen_NLGQK = held_NLGK[:1], seen_NLGQK[:1]
        key_LGKD, end = key_LGKD[..., :num_keys, :], first_row + num_rows
        before_LHQD = query_LHTD[..., max(0, first_row - 1) : end - 1, :]
        if first_row == 0:
            before_LHQD = pad(before_LHQD, (0, 0, 1, 0))
        choice = Choice(
            layer=self._layer,
            query_LHQD=query_LHTD[..., first_row:end, :],
            query_before_LHQD=before_LHQD,
            key_LGKD=key_LGKD,
            held_NLGK=held_NLGK,
            seen_NLGQK=seen_NLGQK,
            budget_NQ=self._budgets(range(first_row + 1, end + 1)).to(key_LGKD.device),
            first_row=first_row,
            fitted=self._fitted,
            binder=self._binders[0],
        )
        read_NLGQK = self._selectors[0].choose(choice) & seen_NLGQK
        return read_NLGQK.expand(self.num_sets, -1, -1, -1, -1)

    def _budgets(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return int64 [N, Q], by the tokens seen at each row."""
        return torch.tensor([[_budget(one, seen) for seen in tokens] for one in self._selectors])


def _budget(selector: Selector, num_tokens: int) -> int:
    if not selector.takes_amount:
        return num_tokens
    if selector.read is None:
        msg = "a selector has no amount: say how much is read, as in +quest:read=0.1."
        raise UsageError(msg)
    return max(1, selector.read.of(num_tokens))
