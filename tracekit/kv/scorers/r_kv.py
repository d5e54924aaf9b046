"""Keys that the newest rows attend to and that no other key resembles stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from tracekit.errors import UsageError
from tracekit.kv.attend import row_blocks
from tracekit.kv.packed import cache_order, pooled
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View


@SCORERS.register("r_kv")
@dataclass(frozen=True)
class RKV(Scorer):
    """Score = ``mix`` * importance - (1 - ``mix``) * redundancy.

    Serves ``rkv`` (R-KV, Cai et al. 2025, arXiv:2505.24133). Importance: logits of the
    last ``window`` rows, their maximum over the group, softmax over the held keys before the
    window, mean over the rows, maximum over ``kernel`` neighbours in the cache. Redundancy: the
    mean cosine of a post-RoPE key to all other held keys, softmax over these; a key does not count
    against the newest of the keys whose cosine with it is above ``threshold``, so that one of
    several like keys stays. Keys of the window stay before all others. Decided every 128 tokens.

    Differences: ``mix`` is 0.1 as in the paper and the README, where the original's scripts have
    0.07; for a key that resembles no other the original's code forgives the first key of the cache,
    here none is forgiven; the original's buffer is the 128 tokens between decisions here.

    Parameters
    ----------
    window
        Rows, and newest keys that stay.
    kernel
        Width of the pooling in keys, odd.
    mix
        Part of the importance in the score, from 0 to 1.
    threshold
        Cosine above which two keys are alike, not negative.
    """

    window: int = 8
    kernel: int = 7
    mix: float = 0.1
    threshold: float = 0.5

    presets: ClassVar = (
        Preset(name="rkv", recent="window", schedule=(("every", "128"), ("from", "prompt"))),
    )

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            msg = f"window={self.window} must be at least 1 and kernel={self.kernel} odd."
            raise UsageError(msg)
        if not 0 <= self.mix <= 1 or not 0 <= self.threshold <= 1:
            msg = f"mix={self.mix} and threshold={self.threshold} must be from 0 to 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """Keys, and the newest rows' logits."""
        return Needs(keys=True, last_queries=self.window)

    def score(self, view: View) -> torch.Tensor:
        """Return importance less redundancy, [N, L, G, K]; infinite inside the window."""
        is_window_K = view.position_K >= view.num_tokens - self.window
        logits_LHQK, layer = view.last_logits_LHQK, view.layer
        logits_LGQK = logits_LHQK.unflatten(1, (layer.num_kv_heads, -1)).amax(2)
        unit_LGKD = functional.normalize(view.key_LGKD, dim=-1)
        scores = []
        for held_LGK in view.held_NLGK:
            importance_LGK = self._importance(logits_LGQK, held_LGK & ~is_window_K)
            redundancy_LGK = self._redundancy(unit_LGKD, held_LGK)
            scores.append(self.mix * importance_LGK - (1 - self.mix) * redundancy_LGK)
        return torch.stack(scores).masked_fill(is_window_K, torch.inf)

    def _importance(self, logits_LGQK: torch.Tensor, past_LGK: torch.Tensor) -> torch.Tensor:
        """Return attention of the window's rows to the keys before it, pooled, [L, G, K]."""
        masked_LGQK = logits_LGQK.masked_fill(~past_LGK[:, :, None], -torch.inf)
        mass_LGK = masked_LGQK.softmax(-1).mean(2)
        return pooled(mass_LGK, past_LGK, self.kernel, "max")

    def _redundancy(self, unit_LGKD: torch.Tensor, held_LGK: torch.Tensor) -> torch.Tensor:
        """Return the softmax of mean cosines over the held keys of one kept set, [L, G, K]."""
        most, size = int(held_LGK.sum(-1).max()), unit_LGKD.shape[-1]
        order_LGC = cache_order(held_LGK)[..., :most]
        unit_LGCD = unit_LGKD.where(held_LGK[..., None], 0)
        unit_LGCD = unit_LGCD.gather(2, order_LGC[..., None].expand(-1, -1, -1, size))
        total_LGC = unit_LGCD.new_zeros(order_LGC.shape)
        row_bytes = unit_LGCD.element_size() * total_LGC.numel()
        for start, end in row_blocks(0, most, row_bytes):
            total_LGC += self._block_total(unit_LGCD, start, end)
        mean_LGC = total_LGC / held_LGK.sum(-1, keepdim=True)
        mean_LGK = torch.zeros_like(held_LGK, dtype=mean_LGC.dtype)
        mean_LGK.scatter_(-1, order_LGC, mean_LGC)
        return mean_LGK.masked_fill(~held_LGK, -torch.inf).softmax(-1)

    def _block_total(self, unit_LGCD: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Return what keys ``start`` .. ``end`` - 1 of the cache count against each, [L, G, C]."""
        cosine_LGRC = unit_LGCD[:, :, start:end] @ unit_LGCD.mT
        cosine_LGRC.diagonal(start, dim1=-2, dim2=-1).zero_()
        place_C = torch.arange(cosine_LGRC.shape[-1], device=cosine_LGRC.device)
        # Rounded, so that a cosine at the threshold is on one side of it in whatever order summed.
        is_alike_LGRC = cosine_LGRC.float() > self.threshold
        newest_LGR1 = torch.where(is_alike_LGRC, place_C, -1).amax(-1, keepdim=True)
        return cosine_LGRC.masked_fill(place_C == newest_LGR1, 0).sum(-2)
