"""The bound: the tokens that the full head finds most likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.measure.logits import best_ids
from tracekit.vocab.estimator import ESTIMATORS, Cost, HindsightEstimator

if TYPE_CHECKING:
    import torch

    from tracekit.measure.head import Head


@ESTIMATORS.register("oracle")
@dataclass(frozen=True)
class Oracle(HindsightEstimator):
    """Top tokens by the true logits: a bound on all estimators, not a method.

    It costs the whole head, because no cheaper way to its candidates exists.
    """

    name: ClassVar[str] = "oracle"

    def ranking(self, logits_SV: torch.Tensor, limit: int) -> torch.Tensor:
        """Return the ids of the highest logits, ties by lower id."""
        return best_ids(logits_SV, limit)

    def cost(self, head: Head, size: int) -> Cost:
        """Return the cost of the full head."""
        del size
        return Cost(macs=head.macs, bytes=head.num_bytes)
