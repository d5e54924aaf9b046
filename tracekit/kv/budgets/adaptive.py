"""The best keys of a layer stay, whichever heads they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.budget import HEAD_BUDGETS, HeadBudget
from tracekit.kv.order import LOWEST
from tracekit.kv.scorer import Preset


@HEAD_BUDGETS.register("adaptive")
@dataclass(frozen=True)
class AdaptiveHeads(HeadBudget):
    """The layer's total goes to its best keys over all heads, a safe part of each head aside.

    Serves ``adakv`` (Ada-KV, Feng et al. 2024, arXiv:2407.11550, algorithm 1), with the score of
    SnapKV, and ``adapyramid``, with the layer budget of PyramidKV as well. Scores of different
    heads are compared as they are; what is protected comes before any score, in all heads.
    Among equals the first head wins.

    Differences: the original mixes the adaptive number of entries with the uniform one
    (``safeguard`` of the latter), and rounds; here, as in kvpress, a head's ``safeguard`` part of
    its budget is given to its best keys, and the rest is shared out by score alone.

    Parameters
    ----------
    safeguard
        Part of its budget that each head keeps in any case, rounded down, at least one entry.
    """

    safeguard: float = 0.2

    presets: ClassVar = (
        Preset(
            name="adakv",
            what="SnapKV's score, a layer's entries to its best keys over all heads",
            scorer="window_attention",
            recent="window",
            items=(("heads", "adaptive"), ("safeguard", "0.2")),
        ),
        Preset(
            name="adapyramid",
            what="SnapKV's score, fewer entries layer by layer, to the best keys over all heads",
            scorer="window_attention",
            recent="window",
            items=(
                ("layers", "pyramid"),
                ("beta", "20.0"),
                ("pyramid_window", "32"),
                ("heads", "adaptive"),
                ("safeguard", "0.2"),
            ),
        ),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.safeguard <= 1:
            msg = f"safeguard={self.safeguard} is a part of the budget, in [0, 1]."
            raise UsageError(msg)

    def share(self, order_NLGK: torch.Tensor, budget_NLG: torch.Tensor) -> torch.Tensor:
        """Return the layer's best keys counted by head; what nobody can use is the first head's."""
        safe_NLG = (budget_NLG * torch.tensor(self.safeguard, dtype=torch.float64)).long()
        sorted_NLGK = order_NLGK.sort(dim=-1, descending=True).values
        rank_K = torch.arange(order_NLGK.shape[-1], device=order_NLGK.device)
        is_held_NLGK = sorted_NLGK > LOWEST
        is_safe_NLGK = (rank_K < safe_NLG.clamp(min=1)[..., None]) & is_held_NLGK
        total_NL1 = budget_NLG.sum(-1, keepdim=True)
        open_NL1 = total_NL1 - is_safe_NLGK.sum((-2, -1))[..., None]
        rest_NLX = sorted_NLGK.masked_fill(is_safe_NLGK, LOWEST).flatten(2)
        best_NLX = rest_NLX.argsort(dim=-1, descending=True, stable=True)
        is_open_NLX = torch.arange(rest_NLX.shape[-1], device=rest_NLX.device) < open_NL1
        is_best_NLX = torch.zeros_like(is_open_NLX).scatter(-1, best_NLX, is_open_NLX)
        is_best_NLX &= rest_NLX > LOWEST
        share_NLG = (is_safe_NLGK | is_best_NLX.reshape(is_safe_NLGK.shape)).sum(-1)
        share_NLG[..., :1] += total_NL1 - share_NLG.sum(-1, keepdim=True)
        return share_NLG
