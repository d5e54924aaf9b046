"""Distances between next-token distributions, and what they come to under exact pruning.

With q = p / m on a candidate set of mass m and 0 elsewhere, total variation is 1 - m, KL(q || p) is
-ln m, and KL(p || q) is infinite whenever m < 1, so it is never averaged.
"""

from __future__ import annotations

import math

import torch


def kl_nats(logp_TV: torch.Tensor, logq_TV: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) of log-probabilities along the last axis, in nats, float64.

    A token of probability 0 under p adds nothing; one that q excludes and p does not gives inf.
    """
    logp_TV, logq_TV = logp_TV.double(), logq_TV.double()
    return torch.where(logp_TV > -math.inf, logp_TV.exp() * (logp_TV - logq_TV), 0.0).sum(-1)


def jsd_nats(logp_TV: torch.Tensor, logq_TV: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence along the last axis, in nats, at most ln 2, float64."""
    middle_TV = torch.logaddexp(logp_TV.double(), logq_TV.double()) - math.log(2)
    return (kl_nats(logp_TV, middle_TV) + kl_nats(logq_TV, middle_TV)) / 2


def neg_log_mass_nats(log_mass: torch.Tensor, log_tail: torch.Tensor) -> torch.Tensor:
    """Return -ln m = KL(pruned || full) in nats from ln m and ln(1 - m).

    Parameters
    ----------
    log_mass, log_tail
        Logarithms of the mass inside and outside of the candidates, each summed by itself: the
        smaller of the two decides, so nothing is lost where m is close to 0 or to 1.

    Returns
    -------
    Tensor
        Same shape; exactly 0 where there is no tail.
    """
    return torch.where(log_tail < -math.log(2), -torch.log1p(-log_tail.exp()), -log_mass)


def jsd_of_mass_nats(mass: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence of pruning to candidates of a given mass, in nats."""
    outside = 1 - mass
    inside: torch.Tensor = torch.special.xlogy(mass, 2 * mass / (1 + mass))
    return (inside + outside * math.log(2) + torch.log(2 / (1 + mass))) / 2
