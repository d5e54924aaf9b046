"""What a back-off costs that has to foretell how much probability its candidates miss."""

from __future__ import annotations

import torch


def causal_backoff_kl_nats(
    missing_SN: torch.Tensor, size_SN: torch.Tensor, backoff_kl_SN: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Return KL(full || back-off) when the missing mass is foretold from the steps before.

    Parameters
    ----------
    missing_SN
        Mass outside of each step's set, float64, steps in order.
    size_SN
        Candidates in each set.
    backoff_kl_SN
        KL to the back-off whose outside mass is the true one, nats.
    num_rows
        V.

    Returns
    -------
    Tensor
        float64 [S, N], nats. The foretold mass of a step is the mean over those before it and one
        more, at which all tokens were alike: it needs no constant and is never 0 while a token is
        outside. With 1 - e on the set, KL is that of the true back-off plus the divergence of the
        two outside masses, m ln(m / (1 - e)) + (1 - m) ln((1 - m) / e). Sets of all tokens have 0.

    Notes
    -----
    A decoder would have to know the mass that it missed at earlier steps: it can estimate it, or run
    the full head now and then.
    """
    prior_SN = (num_rows - size_SN).double() / num_rows
    before_SN = torch.cat([torch.zeros_like(missing_SN[:1]), missing_SN.cumsum(0)[:-1]])
    count_S1 = torch.arange(1, len(missing_SN) + 1)[:, None]
    foretold_SN = (prior_SN + before_SN) / count_S1
    # Without a candidate nothing is foretold for the set: rounding must not leave it a mass.
    inside_SN = (1 - missing_SN).clamp_min(0).masked_fill(size_SN == 0, 0)
    wrong_SN = torch.xlogy(inside_SN, inside_SN) - torch.xlogy(inside_SN, 1 - foretold_SN)
    wrong_SN += torch.xlogy(missing_SN, missing_SN) - torch.xlogy(missing_SN, foretold_SN)
    return (backoff_kl_SN + wrong_SN.clamp_min(0)).masked_fill(size_SN >= num_rows, 0)
