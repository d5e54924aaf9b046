"""Keys without which the newest rows would read something else stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.scorer import EVERY_STEP, SCORERS, Needs, Preset, Scorer
from tracekit.measure.attention import outputs_HQD, weights_HQK

if TYPE_CHECKING:
    from tracekit.kv.view import View
    from tracekit.spec import LayerSpec

ROUNDING = 1e-6
"""Distance, in norms of the largest held value, up to which an output and a value are the same."""


@SCORERS.register("caote")
@dataclass(frozen=True)
class Caote(Scorer):
    """Score = how far the output of the newest rows moves if this key alone is evicted.

    Serves ``caote`` (CAOTE, Goel et al. 2025, arXiv:2504.14051): for attention a, output o and
    value v that is a / (1 - a) ||o - v||, the mean over the last ``window`` rows and the query
    heads of the group, as each of them attends to what is held now. On top of TOVA: decided at
    every step from the newest row; ``at=prompt`` decides once. Keys of the window stay, since the
    rows before them do not see them.

    Written as a ||o' - v||, where o' is the output without the key. For the key that a row attends
    to most o' is computed anew, because 1 - a may round to 0; for all others 1 - a is at least a
    half. Sink logits stay in the denominator. Differences: the original takes attention from the
    method that it is put on and normalises it over the keys; it selects for each head.

    Parameters
    ----------
    window
        Rows, and newest keys that stay.
    """

    window: int = 1

    presets: ClassVar = (Preset(name="caote", recent="window", schedule=EVERY_STEP),)

    def __post_init__(self) -> None:
        if self.window < 1:
            msg = f"window={self.window} is a number of rows, at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The newest rows' attention, and values."""
        return Needs(values=True, last_queries=self.window)

    def score(self, view: View) -> torch.Tensor:
        """Return mean distances, float64 [N, L, G, K]."""
        logits_LHQK, value_LGKD = view.last_logits_LHQK.double(), view.value_LGKD.double()
        norm_LGK = value_LGKD.norm(dim=-1)
        scores = [
            _errors(logits_LHQK, value_LGKD, norm_LGK, held_LGK, view.layer)
            for held_LGK in view.held_NLGK
        ]
        return torch.stack(scores)


def _errors(
    logits_LHQK: torch.Tensor,
    value_LGKD: torch.Tensor,
    norm_LGK: torch.Tensor,
    held_LGK: torch.Tensor,
    layer: LayerSpec,
) -> torch.Tensor:
    """Return mean errors [L, G, K] of one kept set."""
    held_LHK, norm_LHK = (
        one.repeat_interleave(layer.group_size, 1) for one in (held_LGK, norm_LGK)
    )
    logits_LHQK = logits_LHQK.where(held_LHK[:, :, None], -torch.inf)
    weights_LHQK = weights_HQK(logits_LHQK, layer)
    top_LHQ1 = weights_LHQK.argmax(-1, keepdim=True)
    rest_LHQK = weights_HQK(logits_LHQK.scatter(-1, top_LHQ1, -torch.inf), layer)
    is_top_LHQK = torch.zeros_like(weights_LHQK).scatter(-1, top_LHQ1, 1)
    rows_LHXK = torch.cat([weights_LHQK, rest_LHQK, is_top_LHQK], dim=2)
    output_LHQD, rest_LHQD, top_LHQD = outputs_HQD(rows_LHXK, value_LGKD).chunk(3, dim=2)
    gap_LHQK = _distances(output_LHQD, value_LGKD, norm_LHK)
    gap_LHQK = gap_LHQK / (1 - weights_LHQK.scatter(-1, top_LHQ1, 0))
    gap_LHQK.scatter_(-1, top_LHQ1, (rest_LHQD - top_LHQD).norm(dim=-1, keepdim=True))
    least_LH = ROUNDING * norm_LHK.where(held_LHK, 0).amax(-1)
    error_LHQK = weights_LHQK * gap_LHQK.where(gap_LHQK > least_LH[..., None, None], 0)
    score_LGK: torch.Tensor = error_LHQK.mean(2).unflatten(1, (layer.num_kv_heads, -1)).mean(2)
    return score_LGK


def _distances(
    output_LHQD: torch.Tensor, value_LGKD: torch.Tensor, norm_LHK: torch.Tensor
) -> torch.Tensor:
    """Return distances of outputs and values, [L, H, Q, K], without a tensor of Q K D."""
    dot_LHQK = outputs_HQD(output_LHQD, value_LGKD.mT)
    square_LHQ1 = output_LHQD.square().sum(-1, keepdim=True)
    square_LHQK = square_LHQ1 + norm_LHK.square()[:, :, None] - 2 * dot_LHQK
    return square_LHQK.clamp(min=0).sqrt()
