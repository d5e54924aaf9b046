"""The effective support: how many of the most likely tokens reach a part of the mass."""

from __future__ import annotations

import torch

SUPPORTS = (90, 95, 99)
"""Percentages of the mass whose effective support is measured."""

SUPPORT_PREFIX = 64
"""Most likely tokens that are tried before a row is looked at whole."""

BINS_PER_NAT, NUM_BINS = 64, 4096
"""Logits below the largest are counted in bins of this width; the last bin has all the rest."""

MASS_TOLERANCE = 1e-9
"""A mass is reached within this: nine tenths of ten equal tokens are nine tokens, not ten."""


def supports(prob_TV: torch.Tensor, shifted_TV: torch.Tensor) -> list[torch.Tensor]:
    """Return the effective support of each row for each of ``SUPPORTS``.

    Parameters
    ----------
    prob_TV
        Probabilities, float64.
    shifted_TV
        Logits minus the row's largest; masked ones may hold anything, their probability is 0.

    Notes
    -----
    Most rows are settled by their few most likely tokens. In the others no row is sorted whole:
    bins of logits tell in which bin a mass is reached, and that bin alone is sorted.
    """
    goals = [percent / 100 - MASS_TOLERANCE for percent in SUPPORTS]
    reached_TK = prob_TV.topk(min(SUPPORT_PREFIX, prob_TV.shape[1])).values.cumsum(1)
    supports = [(reached_TK < goal).sum(1) + 1 for goal in goals]
    open_X = (reached_TK[:, -1] < goals[-1]).nonzero()[:, 0]
    if len(open_X):
        bins = _Bins(prob_TV[open_X], shifted_TV[open_X])
        for support_T, goal in zip(supports, goals, strict=True):
            support_T[open_X] = bins.support(goal)
    return supports


class _Bins:
    """Rows of probabilities counted in bins, the most likely tokens first."""

    def __init__(self, prob_TV: torch.Tensor, shifted_TV: torch.Tensor) -> None:
        num_rows = len(prob_TV)
        self._prob_TV = prob_TV
        last = NUM_BINS - 1
        bin_TV = (shifted_TV * -BINS_PER_NAT).clamp_(max=last).long()
        self._bin_TV = bin_TV.masked_fill_(prob_TV == 0, last)
        row_T1 = torch.arange(num_rows, device=prob_TV.device)[:, None]
        flat, size = (bin_TV + NUM_BINS * row_T1).view(-1), num_rows * NUM_BINS
        mass = torch.bincount(flat, prob_TV.reshape(-1), minlength=size)
        count = torch.bincount(flat, minlength=size)
        self._mass_TB = mass.view(num_rows, NUM_BINS).cumsum(1)
        self._count_TB = count.view(num_rows, NUM_BINS).cumsum(1)

    def support(self, goal: float) -> torch.Tensor:
        """Return how many of the most likely tokens of each row reach a mass."""
        at_T1 = (self._mass_TB < goal).sum(1, keepdim=True).clamp_(max=NUM_BINS - 1)
        before_T1 = (at_T1 - 1).clamp_min(0)
        is_first_T1 = at_T1 == 0
        mass_T = self._mass_TB.gather(1, before_T1).masked_fill(is_first_T1, 0)[:, 0]
        count_T = self._count_TB.gather(1, before_T1).masked_fill(is_first_T1, 0)[:, 0]
        row_X, token_X = (self._bin_TV == at_T1).nonzero(as_tuple=True)
        prob_X = self._prob_TV[row_X, token_X]
        # By row, and in a row the most likely first.
        order_X = prob_X.argsort(descending=True)
        order_X = order_X[row_X[order_X].argsort(stable=True)]
        row_X, sum_X = row_X[order_X], prob_X[order_X].cumsum(0)
        size_T = torch.bincount(row_X, minlength=len(mass_T))
        start_T = size_T.cumsum(0) - size_T
        earlier_T = torch.where(start_T > 0, sum_X[(start_T - 1).clamp_min(0)], 0)
        missing_X = mass_T[row_X] + (sum_X - earlier_T[row_X]) < goal
        extra_T = torch.bincount(row_X[missing_X], minlength=len(mass_T))
        return count_T + extra_T + 1
