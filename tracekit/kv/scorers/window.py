"""Keys that the newest rows attend to stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tracekit.errors import UsageError
from tracekit.kv.packed import Pool, pooled
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View


@SCORERS.register("window_attention")
@dataclass(frozen=True)
class WindowAttention(Scorer):
    """Score = mean attention of the last ``window`` rows, smoothed over neighbouring keys.

    Serves ``snapkv`` (Li et al. 2024, arXiv:2404.14469, section 4). The rows' softmax runs over
    all held keys, causal inside the window; keys of the window are then left out of the pooling,
    which pads with zeros, and stay before all others. Neighbours are neighbours in the cache:
    after an eviction they need not be adjacent in the text.

    Serves ``finch`` (Corallo and Papotti 2024, TACL 12, section 3) too: no pooling, and kept keys
    turned to their place in the cache. Its window is the question, which ``window`` stands for; the
    prompt is not read chunk by chunk, and there is no factor for rows of weight 0.

    Differences: the original pools and selects for each query head, which holds H / G times the
    cache; kvpress pools each query head and then takes the mean over the group (``order=pool_group``,
    the default); AdaKV and KVCache-Factory reduce first (``order=group_pool``). With average
    pooling and the mean both orders agree. Softmax and pooling are in float32 here, where the
    others round the softmax to the model's type first. Fewer rows than ``window`` are used as
    they are, where kvpress refuses.

    Parameters
    ----------
    window
        Rows, and newest keys that stay.
    kernel
        Width of the pooling in keys, odd.
    pool
        ``avg`` or ``max``.
    reduce
        ``mean`` or ``max`` over the query heads of a KV head.
    order
        ``pool_group`` or ``group_pool``.
    """

    window: int = 32
    kernel: int = 5
    pool: Pool = "avg"
    reduce: Literal["mean", "max"] = "mean"
    order: Literal["pool_group", "group_pool"] = "pool_group"

    presets: ClassVar = (
        Preset(name="snapkv", recent="window"),
        Preset(
            name="finch",
            what="SnapKV's score without smoothing, kept keys turned to their place in the cache",
            recent="window",
            items=(("kernel", "1"), ("positions", "cache")),
        ),
    )

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            msg = f"window={self.window} must be at least 1 and kernel={self.kernel} odd."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The newest rows' attention."""
        return Needs(last_queries=self.window)

    def score(self, view: View) -> torch.Tensor:
        """Return pooled means, [N, L, G, K]; infinite inside the window."""
        group = (-1, view.layer.group_size)
        mass_NLGMK = view.last_attention_NLHQK.mean(dim=-2).unflatten(2, group)
        is_window_K = view.position_K >= view.num_tokens - self.window
        is_past_NLGK = view.held_NLGK & ~is_window_K
        if self.order == "pool_group":
            is_past_NLGMK = is_past_NLGK[:, :, :, None].expand_as(mass_NLGMK)
            smooth_NLGMK = pooled(mass_NLGMK, is_past_NLGMK, self.kernel, self.pool)
            score_NLGK = self._reduced(smooth_NLGMK)
        else:
            mass_NLGK = self._reduced(mass_NLGMK)
            score_NLGK = pooled(mass_NLGK, is_past_NLGK, self.kernel, self.pool)
        return score_NLGK.masked_fill(is_window_K, torch.inf)

    def _reduced(self, score_NLGMK: torch.Tensor) -> torch.Tensor:
        """Return scores [N, L, G, K] of the KV heads."""
        return score_NLGMK.mean(3) if self.reduce == "mean" else score_NLGMK.amax(3)
