"""Read what the row before would have wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.kv.selector import SELECTORS, GroupReduce, Selector
from tracekit.measure.attention import logits_HQK

if TYPE_CHECKING:
    import torch

    from tracekit.kv.selector import Choice
    from tracekit.spec import LayerSpec


@SELECTORS.register("previous")
@dataclass(frozen=True)
class Previous(Selector):
    """Reads the entries with the largest exact attention of the query before, and the row's own.

    After FreeKV (Liu et al. 2025, arXiv:2505.13109): queries of neighbouring rows are alike, so
    what is to be read can be found, and fetched, while the row before is still computed.

    Differences: entries one by one where the original recalls pages, and no correction of heads
    whose query has moved far.

    Parameters
    ----------
    reduce
        ``mean`` or ``max`` over the query heads of a KV head.
    """

    reduce: GroupReduce = "mean"

    def choose(self, choice: Choice) -> torch.Tensor:
        """Return the entries that the query before attends to most, [N, L, G, Q, K]."""
        logits_LHQK = logits_HQK(choice.query_before_LHQD, choice.key_LGKD, choice.layer)
        return choice.best(choice.weights_NLGQK(logits_LHQK, self.reduce))

    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes of a key: all of them are read, if ahead of time."""
        return float(layer.head_dim * bytes_per_number)

    def state_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return 0: the keys are those of the cache."""
        del layer, bytes_per_number
        return 0.0
