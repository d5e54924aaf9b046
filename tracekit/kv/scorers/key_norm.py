"""Keys of small norm stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("key_norm")
@dataclass(frozen=True)
class KeyNorm(Scorer):
    """Score = minus the L2 norm of the key: keys of small norm draw attention.

    Serves ``knorm`` (Devoto et al. 2024, arXiv:2406.11430, section 3). Post-RoPE keys; rotation
    keeps the norm up to one factor. Differences: no layer is left out, where the original skips
    layers 0 and 1; kept entries are rounded down (original: up).
    """

    presets: ClassVar = (Preset(name="knorm"),)

    @property
    def needs(self) -> Needs:
        """Keys."""
        return Needs(keys=True)

    def score(self, view: View) -> torch.Tensor:
        """Return minus the norms, [1, L, G, K]."""
        norm_LGK: torch.Tensor = view.key_LGKD.norm(dim=-1)
        return -norm_LGK[None]
