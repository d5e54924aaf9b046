"""What a row reads of the entries that are there: recall policies, which free nothing.

A selector names, for each row anew, the entries that are read. Nothing is lost: what one row leaves
out the next may read. What it saves is traffic, so it is compared on bytes read a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.amounts import Amount
from tracekit.measure.attention import logits_HQK
from tracekit.registry import Registry

if TYPE_CHECKING:
    import torch

    from tracekit.spec import LayerSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What a selector sees of some rows.

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
        bool: entries that are there.
    seen_NLGQK
        bool: what each row may read: held, not later than itself, inside the window.
    budget_NQ
        int64: entries that each row may read in each head, its own included.
    first_row
        Position of the first row.
    """

    layer: LayerSpec
    query_LHQD: torch.Tensor
    query_before_LHQD: torch.Tensor
    key_LGKD: torch.Tensor
    held_NLGK: torch.Tensor
    seen_NLGQK: torch.Tensor
    budget_NQ: torch.Tensor
    first_row: int

    @property
    def logits_LHQK(self) -> torch.Tensor:
        """Exact logits of the rows, no mask applied."""
        return logits_HQK(self.query_LHQD, self.key_LGKD, self.layer)


@dataclass(frozen=True)
class Selector(ABC):
    """Chooses what each row reads. Parameters are dataclass fields, the amount aside.

    Parameters
    ----------
    read
        Entries that a row reads in each head, of the tokens that it sees; None if not said yet.
    """

    read: Amount | None = None

    causal: ClassVar[bool] = True
    """False if it uses the row's exact attention over all entries: a bound, as cheap as nothing."""

    @abstractmethod
    def choose(self, choice: Choice) -> torch.Tensor:
        """Return bool [N, L, G, Q, K]: entries that are read, a part of ``seen_NLGQK``."""

    @abstractmethod
    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes for each held entry of a KV head that a row reads in order to choose."""


SELECTORS: Registry[Selector] = Registry(
    "selector", package="tracekit.kv.selectors", group="tracekit.selectors"
)
