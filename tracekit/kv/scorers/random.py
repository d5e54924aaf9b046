"""Chance: the baseline that any rule must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from tracekit.kv.scorer import SCORERS, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View


@SCORERS.register("random")
@dataclass(frozen=True)
class Random(Scorer):
    """Score = a number in [0, 1) drawn for the sequence's seed, layer, KV head and position.

    A hash rather than a generator: the number of a key depends on nothing else, so it is the same
    at every decision, whatever else is computed, on every machine.
    """

    presets: ClassVar = (Preset(name="random"),)

    def score(self, view: View) -> torch.Tensor:
        """Return the draws, [1, L, G, K]."""
        heads_G = np.arange(view.layer.num_kv_heads, dtype=np.uint64)
        positions_K = np.arange(view.num_tokens, dtype=np.uint64)
        state = _mix(np.array([view.seed % 2**64], dtype=np.uint64))
        state_L = _mix(state ^ np.array(view.layers, dtype=np.uint64))
        state_LG = _mix(state_L[:, None] ^ heads_G)
        state_LGK = _mix(state_LG[:, :, None] ^ positions_K)
        # 24 bits are what float32 holds exactly.
        draw_LGK = (state_LGK >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        return torch.from_numpy(draw_LGK).to(view.held_NLGK.device)[None]


def _mix(value: np.ndarray) -> np.ndarray:
    """Return splitmix64 of each number (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed
