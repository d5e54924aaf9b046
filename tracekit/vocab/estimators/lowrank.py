"""Preview: rough logits of all tokens from a low-rank copy of the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.measure.logits import best_ids
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.view import View


@ESTIMATORS.register("lowrank")
@dataclass(frozen=True)
class LowRank(CausalEstimator):
    """Top tokens by a truncated singular value decomposition of the head, bias included.

    SVD-softmax (Shim et al., NIPS 2017) without its rough tail: the candidates get exact logits,
    all other tokens none. Scale and soft-cap of the head keep the order (the scale is above 0) and
    are left out of the preview. A rank of E or more is the whole head.

    Parameters
    ----------
    rank
        Axes that are kept.
    """

    name: ClassVar[str] = "lowrank"
    rank: int = 64

    @property
    def needs(self) -> Needs:
        """The hidden state and the head's weight."""
        return Needs(hidden=True, head=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the ids of the highest previews, ties by lower id."""
        copy = view.head.truncated(self.rank)
        short_SR = view.hidden_SE.to(copy.axes_ER) @ copy.axes_ER
        preview_SV = torch.nn.functional.linear(short_SR, copy.weight_VR, view.head.bias_V)
        return best_ids(preview_SV, limit).cpu()

    def cost(self, view: View, size: int) -> Cost:
        """Return one product with the axes and one with the copy, bias and all."""
        del size
        spec = view.head_spec
        rank = min(self.rank, spec.hidden_size)
        macs = rank * (spec.hidden_size + spec.num_rows)
        bias = spec.num_rows * spec.has_bias
        return Cost(macs=macs, bytes=(macs + bias) * view.bytes_per_number)
