"""What a row reads of the entries that are there: recall policies, which free nothing.

A selector names, for each row anew, the entries that are read. Nothing is lost: what one row leaves
out the next may read. What it saves is traffic, so it is compared on bytes read a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tracekit.errors import UsageError
from tracekit.kv.amounts import Amount, Bytes
from tracekit.kv.attend import seen_weights
from tracekit.kv.order import HIGHEST, highest, order_of
from tracekit.kv.scorer import Needs
from tracekit.measure.attention import logits_HQK
from tracekit.registry import Registry

if TYPE_CHECKING:
    from tracekit.kv.pages import Binder, Pages
    from tracekit.kv.view import View
    from tracekit.spec import LayerSpec

Fitted = tuple[torch.Tensor, ...]
"""What a selector learned at the first decision."""

GroupReduce = Literal["mean", "max"]
"""How numbers of the query heads that share a KV head become one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What a selector sees of some rows. N is 1 where all policies hold the same entries.

    Parameters
    ----------
    layer
        The spec that the layers share.
    query_LHQD
        Queries of the rows.
    query_before_LHQD
        Queries of the rows one before each; those of the very first row are zeros.
    key_LGKD
        Keys as attention reads them, up to the last row.
    held_NLGK
        bool: entries that were not evicted.
    seen_NLGQK
        bool: what each row may read: held, not later than itself, inside the window.
    budget_NQ
        int64: entries that each row may read in each head, its own included; N policies always.
    first_row
        Position of the first row.
    fitted
        What the selector's ``fit`` gave.
    binder
        Keeps what is noted of pages.
    """

    layer: LayerSpec
    query_LHQD: torch.Tensor
    query_before_LHQD: torch.Tensor
    key_LGKD: torch.Tensor
    held_NLGK: torch.Tensor
    seen_NLGQK: torch.Tensor
    budget_NQ: torch.Tensor
    first_row: int
    fitted: Fitted
    binder: Binder

    @property
    def pages(self) -> Pages:
        """Held entries in pages of the selector's ``page_size``, as the rows see them."""
        return self.binder.pages(self.held_NLGK, self.key_LGKD, self.first_row)

    @property
    def logits_LHQK(self) -> torch.Tensor:
        """Exact logits of the rows, no mask applied."""
        return logits_HQK(self.query_LHQD, self.key_LGKD, self.layer)

    @property
    def query_LGMQD(self) -> torch.Tensor:
        """Queries of the rows by KV head."""
        num_layers, _, num_rows, size = self.query_LHQD.shape
        groups = (self.layer.num_kv_heads, self.layer.group_size)
        return self.query_LHQD.reshape(num_layers, *groups, num_rows, size)

    @property
    def own_QK(self) -> torch.Tensor:
        """bool: the row's own entry."""
        num_rows, num_keys = self.seen_NLGQK.shape[-2:]
        position_K = torch.arange(num_keys, device=self.seen_NLGQK.device)
        return position_K == position_K[self.first_row : self.first_row + num_rows, None]

    def weights_NLGQK(self, logits_LHQK: torch.Tensor, reduce: GroupReduce) -> torch.Tensor:
        """Return the softmax of logits over what each row may read, reduced over query heads."""
        weights_LGNMQK = seen_weights(logits_LHQK, self.seen_NLGQK, self.layer)
        return reduced(weights_LGNMQK.permute(2, 0, 1, 3, 4, 5), reduce)

    def best(self, score_NLGQK: torch.Tensor) -> torch.Tensor:
        """Return bool [N, L, G, Q, K]: the row's own entry and the highest scores, to the budget.

        Scores are compared in float32; among equals the more recent entry is read.
        """
        order_NLGQK = order_of(score_NLGQK, self.seen_NLGQK).masked_fill(self.own_QK, HIGHEST)
        return highest(order_NLGQK, self.budget_NQ[:, None, None, :])


@dataclass(frozen=True)
class Selector(ABC):
    """Chooses what each row reads. Parameters are dataclass fields, the amount aside.

    Parameters
    ----------
    read
        Entries that a row reads in each head, of the tokens seen, its own included, rounded down,
        at least 1; None if not said yet.

    Raises
    ------
    UsageError
        If an amount is given in bytes, or to a selector that takes none.
    """

    read: Amount | None = None

    causal: ClassVar[bool] = True
    """False if it uses the row's exact attention over all entries: a bound, as cheap as nothing."""
    takes_amount: ClassVar[bool] = True
    """False if the entries read are an outcome, not asked for."""

    def __post_init__(self) -> None:
        if isinstance(self.read, Bytes):
            msg = "read is a fraction such as 0.1 or tokens such as 64tok, not bytes."
            raise UsageError(msg)
        if self.read is not None and not self.takes_amount:
            msg = "this selector finds out itself how much is read: leave read out."
            raise UsageError(msg)

    @property
    def is_open(self) -> bool:
        """Whether an amount is still to be said."""
        return self.takes_amount and self.read is None

    @property
    def needs(self) -> Needs:
        """What ``fit`` reads."""
        return Needs()

    @property
    def page_size(self) -> int:
        """Entries of a page, in cache order; 1 if entries are chosen one by one."""
        return 1

    def fit(self, view: View) -> Fitted:
        """Return what is learned, once and for all, from the rows before the first decision."""
        del view
        return ()

    def summarise(self, key_XCD: torch.Tensor) -> Fitted:
        """Return what is noted of pages when they are full, each tensor [X, ...].

        Parameters
        ----------
        key_XCD
            Keys of X full pages of C entries, as attention reads them then.
        """
        del key_XCD
        return ()

    @abstractmethod
    def choose(self, choice: Choice) -> torch.Tensor:
        """Return bool [N, L, G, Q, K]: entries to read; those out of sight are left out later."""

    @abstractmethod
    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes for each held entry of a KV head that a row reads in order to choose."""

    def state_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes for each held entry of a KV head that are kept beside the cache."""
        return self.index_bytes(layer, bytes_per_number)


SELECTORS: Registry[Selector] = Registry(
    "selector", package="tracekit.kv.selectors", group="tracekit.selectors"
)


def reduced(score_NLGMQX: torch.Tensor, how: GroupReduce) -> torch.Tensor:
    """Return scores [N, L, G, Q, X], reduced over the query heads of each KV head."""
    return score_NLGMQX.mean(3) if how == "mean" else score_NLGMQX.amax(3)
