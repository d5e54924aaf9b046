"""Odd positions stay: a rule without any sense, for control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.scorer import EVERY_STEP, SCORERS, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("odd_positions")
@dataclass(frozen=True)
class OddPositions(Scorer):
    """Score = position, all odd ones before all even ones: a negative control.

    Serves ``keepodd`` (``keep_it_odd`` of AnswerDotAI/cold-compress), decided at every step. What
    it keeps has nothing to do with the text; a rule that is no better has learned nothing from it.
    Differences: nothing is protected unless asked for (``sinks``, ``recent``), where the original
    protects both; even positions are scored last, where the original need not store them at all.
    """

    presets: ClassVar = (Preset(name="keepodd", schedule=EVERY_STEP),)

    def score(self, view: View) -> torch.Tensor:
        """Return positions, odd ones raised above all others, [1, 1, 1, K]."""
        position_K = view.position_K
        score_K = position_K + (position_K % 2) * view.num_tokens
        return score_K[None, None, None].float()
