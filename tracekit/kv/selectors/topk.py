"""Read what the row attends to most: a bound for all selectors of as many entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.order import highest, order_of
from tracekit.kv.selector import SELECTORS, GroupReduce, Selector

if TYPE_CHECKING:
    import torch

    from tracekit.kv.selector import Choice
    from tracekit.spec import LayerSpec


@SELECTORS.register("topk")
@dataclass(frozen=True)
class TopK(Selector):
    """Reads the entries with the row's largest exact attention: a bound, it reads all to read less.

    No set of as many entries has a larger sum of attention over the query heads of a KV head
    (``reduce=mean``). Nothing is read that earns no place, the row's own entry included.

    Parameters
    ----------
    reduce
        ``mean`` or ``max`` over the query heads of a KV head.
    """

    reduce: GroupReduce = "mean"

    causal: ClassVar = False

    def choose(self, choice: Choice) -> torch.Tensor:
        """Return the entries with the largest attention, [N, L, G, Q, K]."""
        weights_NLGQK = choice.weights_NLGQK(choice.logits_LHQK, self.reduce)
        order_NLGQK = order_of(weights_NLGQK, choice.seen_NLGQK)
        return highest(order_NLGQK, choice.budget_NQ[:, None, None])

    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return 0: what a bound would cost is not counted."""
        del layer, bytes_per_number
        return 0.0
