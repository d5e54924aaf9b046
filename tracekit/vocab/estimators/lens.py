"""An early look: the head on the state of a layer below the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.measure.logits import best_ids
from tracekit.parameters import LARGEST
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.view import View


@ESTIMATORS.register("lens")
@dataclass(frozen=True)
class Lens(CausalEstimator):
    """Top tokens by the head's logits of the state that leaves a layer, after the final norm.

    The logit lens (nostalgebraist 2020). The norm's statistics are those of the layer's own state;
    implementations that scale it by what they kept of the final state look ahead. Scale and soft-cap
    of the head keep the order and are left out. It names candidates some layers early but costs the
    whole head: a bound on cheaper searches from that layer.

    Parameters
    ----------
    layer
        The layer; negative ones count from the top, -1 being the last, whose state is the head's own
        input.
    """

    name: ClassVar[str] = "lens"
    least: ClassVar[int] = -LARGEST
    layer: int = -3

    @property
    def needs(self) -> Needs:
        """The layer's state and the head's weight."""
        return Needs(residual=self.layer, head=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the ids of the highest logits, ties by lower id."""
        head = view.head
        state_SE = view.residual_SE().to(head.weight_VE)
        logits_SV = torch.nn.functional.linear(state_SE, head.weight_VE, head.bias_V)
        return best_ids(logits_SV, limit).cpu()

    def cost(self, view: View, size: int) -> Cost:
        """Return the cost of the full head; that of the norm, some numbers E, is not counted."""
        del size
        return Cost(macs=view.head.macs, bytes=view.head.num_bytes)
