"""Keys that point away from the others stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View

CANCELLED = 1e-6
"""Length of a mean of unit vectors below which it is rounding, and points nowhere."""


@SCORERS.register("key_difference")
@dataclass(frozen=True)
class KeyDifference(Scorer):
    """Score = minus the cosine of the key and the mean direction of all held keys.

    Serves ``keydiff`` (KeyDiff, Park et al. 2025, arXiv:2504.15364). Post-RoPE keys of one KV head;
    the mean is that of the unit vectors, and its length does not matter. Where unit vectors cancel,
    all keys score 0. Cosines are rounded to 7 decimals, so that equal ones are equal in whichever
    order they were summed. Difference: the original decides block by block
    while it reads the prompt; here and in kvpress it is once, after the prompt.
    """

    presets: ClassVar = (Preset(name="keydiff"),)

    @property
    def needs(self) -> Needs:
        """Keys."""
        return Needs(keys=True)

    def score(self, view: View) -> torch.Tensor:
        """Return minus the cosines, [N, L, G, K]."""
        unit_LGKD = functional.normalize(view.key_LGKD, dim=-1)
        held_NLGK = view.held_NLGK.to(unit_LGKD)
        total_NLGD = torch.einsum("nlgk,lgkd->nlgd", held_NLGK, unit_LGKD)
        anchor_NLGD = total_NLGD / held_NLGK.sum(-1, keepdim=True)
        norm_NLG1 = anchor_NLGD.norm(dim=-1, keepdim=True)
        anchor_NLGD = (anchor_NLGD / norm_NLG1).masked_fill(norm_NLG1 < CANCELLED, 0)
        return -torch.einsum("lgkd,nlgd->nlgk", unit_LGKD, anchor_NLGD).round(decimals=7)
