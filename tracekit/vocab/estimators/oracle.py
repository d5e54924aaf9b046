"""The bound: the tokens that the full head finds most likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.measure.logits import best_ids
from tracekit.vocab.estimator import ESTIMATORS, HindsightEstimator

if TYPE_CHECKING:
    import torch


@ESTIMATORS.register("oracle")
@dataclass(frozen=True)
class Oracle(HindsightEstimator):
    """Top tokens by the true logits: a bound on all estimators, not a method."""

    name: ClassVar[str] = "oracle"

    def ranking(self, logits_SV: torch.Tensor, limit: int) -> torch.Tensor:
        """Return the ids of the highest logits, ties by lower id."""
        return best_ids(logits_SV, limit)
