"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.kv.scorer import SCORERS, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View


@SCORERS.register("full")
@dataclass(frozen=True)
class Full(Scorer):
    """Keeps everything: the measure of all others."""

    presets: ClassVar = (Preset(name="full"),)
    evicts: ClassVar = False

    def score(self, view: View) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(view.held_NLGK.shape, device=view.held_NLGK.device)
