"""Fall back to the full head where the candidates do not agree on a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.errors import UsageError
from tracekit.vocab.check import CHECKS, Check
from tracekit.vocab.estimator import Cost

if TYPE_CHECKING:
    import torch

    from tracekit.vocab.check import Scored
    from tracekit.vocab.view import View


@CHECKS.register("fallback")
@dataclass(frozen=True)
class Fallback(Check):
    """Sure where the best candidate has at least a given probability among the candidates.

    A set without the right token tends to have no clear favourite. Nothing is proven by it.

    Parameters
    ----------
    confidence
        That probability, from 0 (never fall back) to 1.
    """

    name: ClassVar[str] = "fallback"
    confidence: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.confidence <= 1:
            msg = f"{self.text}: confidence is a probability from 0 to 1."
            raise UsageError(msg)

    def is_sure(self, view: View, scored: Scored) -> torch.Tensor:
        """Return where the favourite is clear; a set of masked tokens has none."""
        del view
        share_SN = (scored.best_SN - scored.logsumexp_SN).exp()
        return (share_SN >= self.confidence) & scored.best_SN.isfinite()

    def cost(self, view: View) -> Cost:
        """Return nothing: the set's softmax is taken anyway."""
        del view
        return Cost()
