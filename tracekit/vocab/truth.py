"""The true distribution of some steps, and the sets that samplers would draw from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracekit.measure.support import MASS_TOLERANCE

TOP_K = 50
"""Tokens of the top-k set."""

TOP_P = 0.95
"""Mass of the top-p set."""

MIN_P = 0.05
"""Least probability in the min-p set, over that of the most likely token."""

RULES = ("top_k", "top_p", "min_p")
"""Samplers' sets, as columns name them."""

LEAST_LOG = torch.finfo(torch.float64).min
"""ln p of any token that is not masked is above it."""

PREFIXES = (128, 2048)
"""Most likely tokens among which a set's end is sought before a row is sorted whole."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Truth:
    """The true distribution of some steps.

    Parameters
    ----------
    logits_SV
        Logits under the full head, float32 [S, V].
    logp_SV, prob_SV, entropy_SV
        ln p, p and -p ln p, float64 [S, V]; 0 for -p ln p of a masked token.
    mass_S1, entropy_S1
        Sums of p, 1 but for rounding, and of -p ln p.
    top_SK
        Most likely tokens of each step, best first, in no order of equal ones.
    best_S
        Most likely token of each step, the lowest id of equal ones.
    chosen_S
        Recorded token of each step.
    least_S
        By rule, ln p of the least likely token of its set, float64 [S].
    """

    logits_SV: torch.Tensor
    logp_SV: torch.Tensor
    prob_SV: torch.Tensor
    entropy_SV: torch.Tensor
    mass_S1: torch.Tensor
    entropy_S1: torch.Tensor
    top_SK: torch.Tensor
    best_S: torch.Tensor
    chosen_S: torch.Tensor
    least_S: dict[str, torch.Tensor]

    @classmethod
    def of(cls, logits_SV: torch.Tensor, chosen_S: torch.Tensor) -> Truth:
        """Return the truth of logits of any floating type, one step a row."""
        logp_SV = logits_SV.double().log_softmax(1)
        prob_SV = logp_SV.exp()
        # The smallest number keeps 0 times -inf from being NaN, and changes nothing else.
        entropy_SV = prob_SV * -logp_SV.clamp_min(LEAST_LOG)
        top_SK = logits_SV.topk(min(PREFIXES[0], logits_SV.shape[1])).indices
        return cls(
            logits_SV=logits_SV,
            logp_SV=logp_SV,
            prob_SV=prob_SV,
            entropy_SV=entropy_SV,
            mass_S1=prob_SV.sum(1, keepdim=True),
            entropy_S1=entropy_SV.sum(1, keepdim=True),
            top_SK=top_SK,
            # Taken from the logits: the shift to log-probabilities may make two of them equal.
            best_S=logits_SV.argmax(1),
            chosen_S=chosen_S,
            least_S=_least(logp_SV, top_SK),
        )

    def facts(self) -> dict[str, torch.Tensor]:
        """Return what is true of each step whatever the set, [S] by column of ``schema.SCORED``."""
        best_S1, chosen_S1 = self.best_S[:, None], self.chosen_S[:, None]
        sizes = {
            f"{rule}_size": (self.logp_SV >= least_S[:, None]).sum(1)
            for rule, least_S in self.least_S.items()
        }
        return {
            "token_id": self.chosen_S,
            "best_id": self.best_S,
            "nll_full": -self.logp_SV.gather(1, chosen_S1)[:, 0],
            "best_prob": self.prob_SV.gather(1, best_S1)[:, 0],
            "entropy_nats": self.entropy_S1[:, 0],
            **sizes,
        }

    @property
    def num_rows(self) -> int:
        """V, rows of the head."""
        return self.logp_SV.shape[1]


def _least(logp_SV: torch.Tensor, top_SK: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return where each rule's set ends; tokens as likely as its last are in it, masked ones never.

    Samplers take top-k so; of equally likely tokens at the end of top-p they keep as many as the
    mass needs, which ones depending on the sort.
    """
    first_SK = logp_SV.gather(1, top_SK)
    nucleus_S = _nucleus(first_SK)
    for size in (*PREFIXES[1:], logp_SV.shape[1]):
        if len(open_X := nucleus_S.isnan().nonzero()[:, 0]):
            first_XK = logp_SV[open_X].topk(min(size, logp_SV.shape[1])).values
            nucleus_S[open_X] = _nucleus(first_XK)
    return {
        "top_k": first_SK[:, min(TOP_K, first_SK.shape[1]) - 1].clamp_min(LEAST_LOG),
        "top_p": nucleus_S,
        "min_p": first_SK[:, 0] + torch.tensor(MIN_P, dtype=torch.float64).log(),
    }


def _nucleus(logp_SK: torch.Tensor) -> torch.Tensor:
    """Return ln p of the token with which descending tokens reach the mass, NaN if they do not."""
    reached_SK = logp_SK.exp().cumsum(1) >= TOP_P - MASS_TOLERANCE
    at_S1 = reached_SK.double().argmax(1, keepdim=True)
    return logp_SK.gather(1, at_S1)[:, 0].masked_fill(~reached_SK.any(1), torch.nan)
