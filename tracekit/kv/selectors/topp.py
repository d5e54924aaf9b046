"""Read as little as has a given share of the attention: a bound whose size is an outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.errors import UsageError
from tracekit.kv.order import highest, order_of
from tracekit.kv.selector import SELECTORS, GroupReduce, Selector

if TYPE_CHECKING:
    import torch

    from tracekit.kv.selector import Choice
    from tracekit.spec import LayerSpec

SLACK = 1e-9
"""Relative: a sum that falls short by less has reached the mass, whatever the rounding."""


@SELECTORS.register("topp")
@dataclass(frozen=True)
class TopP(Selector):
    """Reads the smallest set with a given share of the row's exact attention: a bound.

    The share is of the attention that goes to entries, what sink logits take left out, reduced over
    the query heads of a KV head. At least one entry is read.

    Parameters
    ----------
    mass
        Share of the attention, in (0, 1].
    reduce
        ``mean`` or ``max`` over the query heads of a KV head.
    """

    mass: float = 0.95
    reduce: GroupReduce = "mean"

    causal: ClassVar = False
    takes_amount: ClassVar = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mass <= 1:
            msg = f"mass={self.mass} is not in (0, 1]."
            raise UsageError(msg)

    def choose(self, choice: Choice) -> torch.Tensor:
        """Return the fewest entries with the mass, [N, L, G, Q, K]."""
        weights_NLGQK = choice.weights_NLGQK(choice.logits_LHQK, self.reduce)
        sums_NLGQK = weights_NLGQK.double().sort(dim=-1, descending=True).values.cumsum(-1)
        wanted_NLGQ1 = self.mass * (1 - SLACK) * sums_NLGQK[..., -1:]
        count_NLGQ = 1 + (sums_NLGQK < wanted_NLGQ1).sum(-1)
        return highest(order_of(weights_NLGQK, choice.seen_NLGQK), count_NLGQ)

    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return 0: what a bound would cost is not counted."""
        del layer, bytes_per_number
        return 0.0
