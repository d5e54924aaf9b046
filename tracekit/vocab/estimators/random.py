"""Random tokens: what a set covers that knows nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost

if TYPE_CHECKING:
    from tracekit.vocab.view import View

STRIDE = 0.6180339887498949
"""Part of the order by which a step begins further on than the one before."""


@ESTIMATORS.register("random")
@dataclass(frozen=True)
class Random(CausalEstimator):
    """One random order of all tokens, from another place of it on at each step.

    Parameters
    ----------
    seed
        Of the order.
    """

    name: ClassVar[str] = "random"
    least: ClassVar[int] = 0
    seed: int = 0

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return a stretch of the order for each step."""
        num_rows = view.head_spec.num_rows
        order_V = torch.randperm(num_rows, generator=torch.Generator().manual_seed(self.seed))
        start_S = (view.rows_S.double() * STRIDE % 1 * num_rows).long()
        return order_V[(start_S[:, None] + torch.arange(limit)) % num_rows]

    def cost(self, view: View, size: int) -> Cost:
        """Return nothing."""
        del view, size
        return Cost()
