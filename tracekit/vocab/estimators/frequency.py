"""A fixed list: the tokens that came most often in other prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    import torch

    from tracekit.measure.head import Head
    from tracekit.vocab.view import View


@ESTIMATORS.register("frequency")
@dataclass(frozen=True)
class Frequency(CausalEstimator):
    """Most frequent tokens of the trace's other prompts, the same at every step.

    FR-Spec (Zhao et al. 2025, arXiv:2502.14856, section 3) and VocabTrim (arXiv:2506.22694), with
    other counts: theirs come from a large corpus or calibration set, these from what the trace
    holds of other prompts, template and generated text included. Ties, and tokens that never came,
    go by lower id.
    """

    name: ClassVar[str] = "frequency"

    @property
    def needs(self) -> Needs:
        """Counts."""
        return Needs(counts=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the same ids for all steps."""
        ids_V = view.counts_V.argsort(descending=True, stable=True)
        return ids_V[:limit].expand(view.num_steps, -1)

    def cost(self, head: Head, size: int) -> Cost:
        """Return nothing: the rows of a fixed list can be stored side by side, in its order."""
        del head, size
        return Cost()
