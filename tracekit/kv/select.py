"""Which keys of a head stay, given their scores, what is protected, and the head's budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from tracekit.kv.amounts import Amount

_GONE, _SCORED, _RECENT, _SINK = -2, -1, 0, 1


class Selection(NamedTuple):
    """Kept keys, bool [N, L, G, K], and where protection exceeded the budget, bool [N, L, G]."""

    kept_NLGK: torch.Tensor
    clipped_NLG: torch.Tensor


@dataclass(frozen=True)
class Protection:
    """Keys that stay whatever their score, as far as the budget allows.

    Parameters
    ----------
    sinks
        First positions of the sequence.
    recent
        Newest positions: tokens, or a fraction of the budget (rounded down).
    """

    sinks: int
    recent: Amount

    def __post_init__(self) -> None:
        if self.sinks < 0:
            msg = f"sinks={self.sinks} is not a number of tokens."
            raise UsageError(msg)

    def tiers(self, budget_NLG: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the rank that comes before any score.

        Parameters
        ----------
        budget_NLG
            Entries that each head keeps, int64.
        num_tokens
            K, the tokens seen.

        Returns
        -------
        Tensor
            int64 [N, L, G, K]: sinks before the newest before all others.
        """
        recent = [self.recent.of(budget) for budget in budget_NLG.flatten().tolist()]
        recent_NLG1 = budget_NLG.new_tensor(recent).reshape(*budget_NLG.shape, 1)
        position_K = torch.arange(num_tokens, device=budget_NLG.device)
        is_recent_NLGK = position_K >= num_tokens - recent_NLG1
        tier_NLGK = torch.where(is_recent_NLGK, _RECENT, _SCORED)
        tier_NLGK[..., : self.sinks] = _SINK
        return tier_NLGK


def select(
    score_NLGK: torch.Tensor,
    held_NLGK: torch.Tensor,
    budget_NLG: torch.Tensor,
    protection: Protection,
) -> Selection:
    """Return the keys that stay: each head keeps min(budget, held).

    Order: sinks (the first position first), then the newest, then by score in float32; among
    equals the more recent position.

    Parameters
    ----------
    score_NLGK
        Higher stays longer; no NaN where a key is held. N may be 1, the same for all.
    held_NLGK
        bool, keys that are there.
    budget_NLG
        int64, at least 1.
    protection
        What comes before the score.
    """
    num_keys = held_NLGK.shape[-1]
    tier_NLGK = protection.tiers(budget_NLG, num_keys)
    protected_NLG = ((tier_NLGK > _SCORED) & held_NLGK).sum(-1)
    order_NLGK = _order(score_NLGK, tier_NLGK.masked_fill(~held_NLGK, _GONE))
    last_NLG1 = (budget_NLG.clamp(max=num_keys) - 1)[..., None]
    ranked_NLGK = order_NLGK.sort(dim=-1, descending=True).values
    kept_NLGK = (order_NLGK >= ranked_NLGK.gather(-1, last_NLG1)) & held_NLGK
    return Selection(kept_NLGK, protected_NLG > budget_NLG)


def _order(score_NLGK: torch.Tensor, tier_NLGK: torch.Tensor) -> torch.Tensor:
    """Return one int64 a key that no two keys share: tier, then score, then position.

    2 bits of tier, 32 bits of score (a float32 read as an integer keeps its order once negative
    numbers are turned around), 30 bits of position. Without ties any sort gives the same set.
    """
    position_K = torch.arange(tier_NLGK.shape[-1], device=tier_NLGK.device)
    bits = (score_NLGK.float() + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    level = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    level = level.where(tier_NLGK <= _SCORED, torch.where(tier_NLGK == _SINK, -position_K, 0))
    return (tier_NLGK << 62) + ((level + (1 << 31)) << 30) + position_K
