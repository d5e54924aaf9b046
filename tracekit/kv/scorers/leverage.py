"""Keys that other keys cannot be combined into stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from tracekit.errors import UsageError
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer
from tracekit.measure.rope import undo

if TYPE_CHECKING:
    from tracekit.kv.view import View


@SCORERS.register("leverage")
@dataclass(frozen=True)
class Leverage(Scorer):
    """Score = statistical leverage of the key: x (X^T X + ridge I)^-1 x.

    Serves ``leverage`` (Compactor, Chari and Van Durme 2025, arXiv:2507.08143, its first half). X
    are the held pre-RoPE keys of a KV head less their mean. Layers without rotary embedding need no
    turning back. Computed in float64. Differences: exact by default, where the original and
    kvpress project keys at random to 48 numbers, which is ``sketch=48`` (other draws); the ridge
    is always ``ridge``, where kvpress raises it if its float32 decomposition fails; no z-score over
    heads, which changes no order within a head; keys are turned back from what was recorded, so
    half precision leaves its rounding in them.

    Parameters
    ----------
    sketch
        Numbers that keys are projected to by a Gaussian matrix, drawn for the sequence's seed, the
        layer and the KV head; 0: no projection.
    ridge
        Added to the diagonal, above 0.
    """

    sketch: int = 0
    ridge: float = 0.01

    presets: ClassVar = (Preset(name="leverage"),)

    def __post_init__(self) -> None:
        if self.sketch < 0 or self.ridge <= 0:
            msg = f"sketch={self.sketch} must not be negative and ridge={self.ridge} be above 0."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """Keys."""
        return Needs(keys=True)

    def score(self, view: View) -> torch.Tensor:
        """Return leverages, [N, L, G, K]."""
        return self.among(view, view.held_NLGK)

    def among(self, view: View, counted_NLGK: torch.Tensor) -> torch.Tensor:
        """Return leverages among some of the keys, float64 [N, L, G, K]; 0 for all others."""
        layers = range(len(view.layers))
        return torch.stack(
            [self._leverages(self._keys(view, at), counted_NLGK[:, at]) for at in layers], dim=1
        )

    def _keys(self, view: View, at: int) -> torch.Tensor:
        """Return the keys of one layer before the rotary embedding, projected: [G, K, D]."""
        key_GKD = view.key_LGKD[at]
        if view.rope is not None:
            key_GKD = undo(key_GKD, view.position_K, view.rope)
        key_GKD = key_GKD.double()
        if not self.sketch:
            return key_GKD
        shape = (key_GKD.shape[-1], self.sketch)
        seeds = [(view.seed % 2**64, view.layers[at], head) for head in range(len(key_GKD))]
        draws = [np.random.default_rng(seed).standard_normal(shape) for seed in seeds]
        draw_GDS = torch.from_numpy(np.stack(draws)).to(key_GKD.device)
        sketch_GKS: torch.Tensor = key_GKD @ draw_GDS / self.sketch**0.5
        return sketch_GKS

    def _leverages(self, key_GKD: torch.Tensor, counted_NGK: torch.Tensor) -> torch.Tensor:
        """Return leverages of one layer, [N, G, K]."""
        counted_NGK1 = counted_NGK[..., None]
        total_NG1D = key_GKD.where(counted_NGK1, 0).sum(-2, keepdim=True)
        mean_NG1D = total_NG1D / counted_NGK1.sum(-2, keepdim=True).clamp(min=1)
        centred_NGKD = (key_GKD - mean_NG1D).where(counted_NGK1, 0)
        ridge_DD = self.ridge * torch.eye(key_GKD.shape[-1]).to(key_GKD)
        # Of keys that are not finite the factor is not either, and the engine says where.
        factor_NGDD, _ = torch.linalg.cholesky_ex(centred_NGKD.mT @ centred_NGKD + ridge_DD)
        white_NGDK = torch.linalg.solve_triangular(factor_NGDD, centred_NGKD.mT, upper=False)
        leverage_NGK: torch.Tensor = white_NGDK.square().sum(-2)
        return leverage_NGK
