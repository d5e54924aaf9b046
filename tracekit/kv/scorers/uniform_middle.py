"""Keys evenly spaced over the text stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.kv.scorer import SCORERS, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View

NUM_BITS = 24
"""Bits of a position that count: as many as float32 holds exactly."""


@SCORERS.register("uniform_middle")
@dataclass(frozen=True)
class UniformMiddle(Scorer):
    """Score = minus the position, its bits read backwards, so that any number kept is evenly spaced.

    Serves ``sinkuniform`` (sinks, the newest, and an even middle: "sink + uniform" of
    leeyenaaa/simple_kv_cache; LaCache, Shi et al. 2025, arXiv:2507.14204, spreads its middle over
    layers too). The order is that of van der Corput (1935): multiples of the highest power of two
    first, then the odd multiples of its half in an order that is even itself, and so on. Gaps in
    the middle are some power of two or twice that. The order of two keys never changes and the
    sets are nested, so that deciding again and again thins out evenly what is there, too.
    Differences: the originals space a middle of known length exactly evenly, and anew each time.
    """

    presets: ClassVar = (Preset(name="sinkuniform", sinks=4, recent="0.5"),)

    def score(self, view: View) -> torch.Tensor:
        """Return minus the mirrored positions, [1, 1, 1, K]."""
        position_K = view.position_K
        bits = (((position_K >> bit) & 1) << (NUM_BITS - 1 - bit) for bit in range(NUM_BITS))
        mirrored_K = sum(bits, start=torch.zeros_like(position_K))
        return -mirrored_K[None, None, None].float()
