"""What nested candidate sets cover of the true distribution, all sizes of a ranking at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tracekit.errors import TracekitError
from tracekit.measure.divergence import neg_log_mass_nats

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, eq=False)
class Truth:
    """The true distribution of some steps, and the tokens that are always candidates.

    Parameters
    ----------
    logp_SV
        Log-probabilities under the full head, float64 [S, V].
    best_S
        Most likely token of each step, the lowest id of equal ones.
    chosen_S
        Recorded token of each step.
    pinned_P
        Ids that are always candidates, none twice.
    """

    logp_SV: torch.Tensor
    best_S: torch.Tensor
    chosen_S: torch.Tensor
    pinned_P: torch.Tensor

    @classmethod
    def of(cls, logits_SV: torch.Tensor, chosen_S: torch.Tensor, pinned_P: torch.Tensor) -> Truth:
        """Return the truth of logits of any floating type."""
        logp_SV = logits_SV.double().log_softmax(1)
        # Taken from the logits: the shift to log-probabilities may make two of them equal.
        return cls(logp_SV, logits_SV.argmax(1), chosen_S, pinned_P)


def coverage(truth: Truth, ids_SK: torch.Tensor, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return what the pinned tokens and the first ``size`` other tokens of a ranking cover.

    Parameters
    ----------
    truth
        The steps.
    ids_SK
        Ranking of each step, best first, int64 [S, K]; -1 is no token, and pinned tokens in it are
        passed over, so that a size counts the tokens beside them.
    sizes
        Sizes N; from V on all tokens are candidates, whatever the ranking.

    Returns
    -------
    dict
        float64 [S, N] by the column of ``schema.VOCAB_RESULTS`` whose mean over steps it is.

    Raises
    ------
    TracekitError
        If a ranking holds a token twice.

    Notes
    -----
    Masses are summed in log space, inside and outside of the set each by itself, so that neither
    is a difference from 1. ``nll_backoff`` is the surprisal under p on the set and (1 - m) spread
    evenly over the V - |C| other tokens: the back-off whose weight is the true missing mass, the
    best one of its kind.
    """
    num_rows = truth.logp_SV.shape[1]
    ids_SK = _beside_pinned(truth, ids_SK, min(max(sizes), num_rows))
    whole_N = torch.tensor([size >= num_rows for size in sizes])
    end_N = torch.tensor([min(size, ids_SK.shape[1]) for size in sizes])
    count_SN = len(truth.pinned_P) + torch.minimum((ids_SK >= 0).sum(1, keepdim=True), end_N)
    count_SN = count_SN.masked_fill(whole_N, num_rows)

    mass_SN, tail_SN = _log_masses(truth, ids_SK, end_N)
    mass_SN, tail_SN = mass_SN.masked_fill(whole_N, 0), tail_SN.masked_fill(whole_N, -torch.inf)
    neg_log_mass_SN = neg_log_mass_nats(mass_SN, tail_SN)

    has_chosen_SN = _holds(truth, ids_SK, truth.chosen_S, end_N) | whole_N
    nll_S1 = -truth.logp_SV.gather(1, truth.chosen_S[:, None])
    spread_SN = torch.log((num_rows - count_SN).clamp_min(1).double()) - tail_SN
    return {
        "hit_chosen": has_chosen_SN.double(),
        "hit_argmax": (_holds(truth, ids_SK, truth.best_S, end_N) | whole_N).double(),
        "mass": torch.exp(-neg_log_mass_SN),
        "neg_log_mass_nats": neg_log_mass_SN,
        "set_size_mean": count_SN.double(),
        "nll_full": nll_S1.expand(-1, len(sizes)),
        "nll_backoff": torch.where(has_chosen_SN, nll_S1, spread_SN),
    }


def _beside_pinned(truth: Truth, ids_SK: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the first ``limit`` ids that are tokens and not pinned, -1 behind them."""
    is_pinned_V = torch.zeros(truth.logp_SV.shape[1], dtype=torch.bool)
    is_pinned_V[truth.pinned_P] = True
    keeps_SK = (ids_SK >= 0) & ~is_pinned_V[ids_SK]
    # Each kept id moves left by the dropped ones before it; the rest lands in a column cut off.
    place_SK = (keeps_SK.cumsum(1) - 1).masked_fill(~keeps_SK, limit).clamp_max(limit)
    kept_SK = ids_SK.new_full((len(ids_SK), limit + 1), -1)
    return kept_SK.scatter_(1, place_SK, ids_SK)[:, :limit]


def _log_masses(
    truth: Truth, ids_SK: torch.Tensor, end_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ln of the mass inside and outside of each set, [S, N] each."""
    logp_SV, is_none_SK = truth.logp_SV, ids_SK < 0
    is_inside_SV = torch.zeros((len(logp_SV), logp_SV.shape[1] + 1), dtype=torch.bool)
    is_inside_SV.scatter_(1, ids_SK.masked_fill(is_none_SK, logp_SV.shape[1]), value=True)
    is_inside_SV = is_inside_SV[:, :-1]
    if (is_inside_SV.sum(1) != (~is_none_SK).sum(1)).any():
        msg = "a ranking holds a token twice."
        raise TracekitError(msg)
    is_inside_SV[:, truth.pinned_P] = True
    rest_S1 = logp_SV.masked_fill(is_inside_SV, -torch.inf).logsumexp(1, keepdim=True)
    pinned_S1 = logp_SV[:, truth.pinned_P].logsumexp(1, keepdim=True)
    ranked_SK = logp_SV.gather(1, ids_SK.clamp_min(0)).masked_fill(is_none_SK, -torch.inf)
    inside_SK = torch.cat([pinned_S1, ranked_SK], 1).logcumsumexp(1)
    outside_SK = torch.cat([ranked_SK, rest_S1], 1).flip(1).logcumsumexp(1).flip(1)
    return inside_SK[:, end_N], outside_SK[:, end_N]


def _holds(
    truth: Truth, ids_SK: torch.Tensor, token_S: torch.Tensor, end_N: torch.Tensor
) -> torch.Tensor:
    """Return whether a token of each step is in each set, bool [S, N]."""
    is_pinned_S1 = torch.isin(token_S, truth.pinned_P)[:, None]
    found_SK = (ids_SK == token_S[:, None]).cumsum(1) > 0
    return is_pinned_S1 | found_SK[:, end_N - 1]
