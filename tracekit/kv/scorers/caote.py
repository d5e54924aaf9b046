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
"""Distance, in norms of the largest held value, up to which a value and an output are the same."""


@SCORERS.register("caote")
@dataclass(frozen=True)
class Caote(Scorer):
    """Score = how far the output of the newest rows moves if this key alone is evicted.

    Serves ``caote`` (CAOTE, Goel et al. 2025, arXiv:2504.14051, section 3): for attention a, output
    o and value v that is a / (1 - a) ||o - v||, the mean over the last ``window`` rows and the
    query heads of the group, as each of them attends to what is held now. On top of TOVA: decided at
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
    uses_values: ClassVar = True

    def __post_init__(self) -> None:
        if self.window < 1:
            msg = f"window={self.window} is a number of rows, at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The newest rows' attention, and values."""
        return Needs(values=True, last_queries=self.window)

    def score(self, view: View) -> torch.Tensor:
        """Return mean distances, [N, L, G, K]."""
        held_NLHK = view.held_NLGK.repeat_interleave(view.layer.group_size, dim=2)
        logits_LHQK = view.last_logits_LHQK
        logits_NLHQK = torch.where(held_NLHK[..., None, :], logits_LHQK, -torch.inf)
        weights_NLHQK = weights_HQK(logits_NLHQK, view.layer)
        gap_NLHQK = _gaps(logits_NLHQK, weights_NLHQK, view)
        norm_NLGK = view.value_LGKD.norm(dim=-1).where(view.held_NLGK, 0)
        least_NLG = ROUNDING * norm_NLGK.amax(-1)
        least_NLH11 = least_NLG.repeat_interleave(view.layer.group_size, dim=2)[..., None, None]
        error_NLHQK = weights_NLHQK * gap_NLHQK.where(gap_NLHQK > least_NLH11, 0)
        score_NLGK: torch.Tensor = _by_group(error_NLHQK.mean(-2), view.layer).mean(3)
        return score_NLGK


def _gaps(logits_NLHQK: torch.Tensor, weights_NLHQK: torch.Tensor, view: View) -> torch.Tensor:
    """Return distances of each value to the output without it, [N, L, H, Q, K]."""
    layer, value_LGKD = view.layer, view.value_LGKD
    top_NLHQ1 = weights_NLHQK.argmax(-1, keepdim=True)
    others_NLHQK = weights_NLHQK.scatter(-1, top_NLHQ1, 0)
    gap_NLHQK = _distances(outputs_HQD(weights_NLHQK, value_LGKD), view) / (1 - others_NLHQK)
    rest_NLHQK = weights_HQK(logits_NLHQK.scatter(-1, top_NLHQ1, -torch.inf), layer)
    is_top_NLHQK = torch.zeros_like(weights_NLHQK).scatter(-1, top_NLHQ1, 1)
    top_value_NLHQD = outputs_HQD(is_top_NLHQK, value_LGKD)
    top_gap_NLHQ = (outputs_HQD(rest_NLHQK, value_LGKD) - top_value_NLHQD).norm(dim=-1)
    return gap_NLHQK.scatter(-1, top_NLHQ1, top_gap_NLHQ[..., None])


def _distances(output_NLHQD: torch.Tensor, view: View) -> torch.Tensor:
    """Return distances of outputs and values, [N, L, H, Q, K], without a tensor of Q K D."""
    output_NLGXD = _by_group(output_NLHQD, view.layer).flatten(3, 4)
    value_NLGKD = view.value_LGKD.expand(len(output_NLHQD), -1, -1, -1, -1)
    # Not by way of squares, which lose what little is left between neighbours.
    exact = "donot_use_mm_for_euclid_dist"
    gap_NLGXK = torch.cdist(output_NLGXD, value_NLGKD, compute_mode=exact)
    gap_NLHQK: torch.Tensor = gap_NLGXK.unflatten(3, (-1, output_NLHQD.shape[3])).flatten(2, 3)
    return gap_NLHQK


def _by_group(array_NLH: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """Return [N, L, H, ...] as [N, L, G, M, ...]."""
    array_NLGM: torch.Tensor = array_NLH.unflatten(2, (layer.num_kv_heads, -1))
    return array_NLGM
