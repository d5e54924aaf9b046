"""Which keys of a head stay, given their scores, what is protected, and the head's budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from tracekit.errors import UsageError
from tracekit.kv.amounts import Amount, Tokens
from tracekit.kv.order import HIGHEST, LOWEST, PLACE_BITS, level_of

if TYPE_CHECKING:
    from tracekit.kv.budget import HeadBudget

_SCORED, _TEMPLATE, _RECENT, _SINK = -2, -1, 0, 1
_NONE = Tokens(0)


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
    grace
        Tokens for which a new key stays, so that it can earn a score: ``recent`` is at least this.
    template
        Whether the tokens of the chat template stay (``kept``) or are scored like all others.
    """

    sinks: int = 0
    recent: Amount = _NONE
    grace: int = 0
    template: Literal["scored", "kept"] = "scored"

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.grace < 0:
            msg = f"sinks={self.sinks} and grace={self.grace} are numbers of tokens, not negative."
            raise UsageError(msg)

    def tiers(
        self, budget_NLG: torch.Tensor, num_tokens: int, template_K: torch.Tensor
    ) -> torch.Tensor:
        """Return the rank that comes before any score.

        Parameters
        ----------
        budget_NLG
            Entries that each head keeps, int64.
        num_tokens
            K, the tokens seen.
        template_K
            bool: tokens of the chat template.

        Returns
        -------
        Tensor
            int64 [N, L, G, K]: sinks before the newest before the template before all others.
        """
        values = budget_NLG.flatten().tolist()
        # Mostly all heads have one budget: one line then serves them all.
        lines = {one: self._tiers(one, num_tokens, template_K) for one in set(values)}
        if len(lines) == 1:
            return lines[values[0]].expand(*budget_NLG.shape, -1)
        return torch.stack([lines[one] for one in values]).reshape(*budget_NLG.shape, -1)

    def _tiers(self, budget: int, num_tokens: int, template_K: torch.Tensor) -> torch.Tensor:
        """Return the ranks of one head, int64 [K]."""
        tier_K = torch.full_like(template_K, _SCORED, dtype=torch.int64)
        if self.template == "kept":
            tier_K[template_K] = _TEMPLATE
        recent = max(self.grace, self.recent.of(budget))
        tier_K[max(0, num_tokens - recent) :] = _RECENT
        tier_K[: self.sinks] = _SINK
        return tier_K


def select(
    score_NLGK: torch.Tensor,
    held_NLGK: torch.Tensor,
    budget_NLG: torch.Tensor,
    protection: Protection,
    heads: HeadBudget,
    template_K: torch.Tensor,
) -> Selection:
    """Return the keys that stay: each layer keeps min(budget, held), over its heads.

    Order: sinks (the first position first), then the newest, then the template, then by score in
    float32; among equals the more recent position. What a head cannot use, since it holds fewer,
    goes to the next best keys of the layer's other heads.

    Parameters
    ----------
    score_NLGK
        Higher stays longer; no NaN where a key is held. Axes may be 1, the same for all.
    held_NLGK
        bool, keys that are there.
    budget_NLG
        int64, at least 1.
    protection
        What comes before the score.
    heads
        How a layer's budget is shared out over its heads.
    template_K
        bool: tokens of the chat template.
    """
    tier_NLGK = protection.tiers(budget_NLG, held_NLGK.shape[-1], template_K)
    protected_NLG = ((tier_NLGK > _SCORED) & held_NLGK).sum(-1)
    order_NLGK = _order(score_NLGK, tier_NLGK)
    num_held_NLG = held_NLGK.sum(-1).expand(budget_NLG.shape)
    share_NLG = heads.share(order_NLGK.where(held_NLGK, LOWEST), budget_NLG)
    excess_NLG = (num_held_NLG - share_NLG).clamp(min=0)
    evicted_NLGK = _lowest(order_NLGK.where(held_NLGK, HIGHEST), excess_NLG)
    kept_NLGK = held_NLGK & ~evicted_NLGK
    spare_NL = (share_NLG - num_held_NLG).clamp(min=0).sum(-1)
    if bool(spare_NL.any()):
        kept_NLGK |= _highest_of_layer(order_NLGK.where(evicted_NLGK, LOWEST), spare_NL)
    return Selection(kept_NLGK, protected_NLG > share_NLG)


def _lowest(order_NLGK: torch.Tensor, count_NLG: torch.Tensor) -> torch.Tensor:
    """Return bool [N, L, G, K]: the ``count`` lowest of each head."""
    most = int(count_NLG.max())
    if most == 0:
        return torch.zeros_like(order_NLGK, dtype=torch.bool)
    lowest_NLGC = order_NLGK.topk(most, dim=-1, largest=False).values
    last_NLG1 = lowest_NLGC.gather(-1, (count_NLG - 1).clamp(min=0)[..., None])
    return (order_NLGK <= last_NLG1) & (count_NLG > 0)[..., None]


def _highest_of_layer(order_NLGK: torch.Tensor, count_NL: torch.Tensor) -> torch.Tensor:
    """Return bool [N, L, G, K]: the ``count`` highest of each layer that are to be had."""
    flat_NLX = order_NLGK.flatten(2)
    rank_NLX = flat_NLX.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    chosen_NLX = (rank_NLX < count_NL[..., None]) & (flat_NLX > LOWEST)
    return chosen_NLX.reshape(order_NLGK.shape)


def _order(score_NLGK: torch.Tensor, tier_NLGK: torch.Tensor) -> torch.Tensor:
    """Return one int64 a key that no two keys of a head share: tier, then score, then position.

    3 bits of tier, 32 bits of score, 28 bits of position.
    """
    position_K = torch.arange(tier_NLGK.shape[-1], device=tier_NLGK.device)
    protected_NLGK = torch.where(tier_NLGK == _SINK, -position_K, 0)
    level_NLGK = level_of(score_NLGK).where(tier_NLGK <= _SCORED, protected_NLGK)
    score_bits = (level_NLGK + (1 << 31)) << PLACE_BITS
    return (tier_NLGK << (32 + PLACE_BITS)) + score_bits + position_K
