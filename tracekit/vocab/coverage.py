"""What nested candidate sets cover of the true distribution, any sizes of a ranking at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tracekit.errors import TracekitError
from tracekit.measure.divergence import jsd_of_mass_nats
from tracekit.vocab.check import Scored
from tracekit.vocab.order import packed
from tracekit.vocab.truth import LEAST_LOG, RULES

if TYPE_CHECKING:
    from tracekit.vocab.truth import Truth

DIFFERENCE_FROM = 1e-6
"""Mass outside of a whole ranking from which it is the rest of all mass: right to 1e-9 of itself."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Prefixes:
    """Sums over a ranking's prefixes and over what is outside of them.

    Column c is of the set of the pinned tokens and the first c others, [S, K + 1] each: sums inside
    and outside are taken each by itself, the small one of the two never as a difference from 1.

    Parameters
    ----------
    truth
        The steps.
    ids_SK
        The ranking beside the pinned tokens, -1 behind its end.
    pinned_P
        Ids in every set.
    num_ranked_S
        Ids of each step's ranking.
    inside, outside
        Mass.
    entropy_outside
        Sum of -p ln p.
    best_outside
        Largest ln p, -inf where nothing is outside.
    """

    truth: Truth
    ids_SK: torch.Tensor
    pinned_P: torch.Tensor
    num_ranked_S: torch.Tensor
    inside: torch.Tensor
    outside: torch.Tensor
    entropy_outside: torch.Tensor
    best_outside: torch.Tensor

    @classmethod
    def of(cls, truth: Truth, ids_SK: torch.Tensor, pinned_P: torch.Tensor, limit: int) -> Prefixes:
        """Return the sums of a ranking, int64 [S, K], best first; -1 is no token.

        Pinned tokens in it are passed over, so that a size counts the tokens beside them; at most
        ``limit`` others are looked at.

        Raises
        ------
        TracekitError
            If a ranking holds a token twice, or one that the head does not have.
        """
        ids_SK = _beside_pinned(ids_SK, pinned_P, truth.num_rows)[:, :limit]
        ids_SK = ids_SK[:, : int((ids_SK >= 0).sum(1).max())]
        is_none_SK = ids_SK < 0
        logp_SK = truth.logp_SV.gather(1, ids_SK.clamp_min(0))
        logp_SK = logp_SK.masked_fill_(is_none_SK, -torch.inf)
        prob_SK = logp_SK.exp()
        entropy_SK = prob_SK * -logp_SK.clamp_min(LEAST_LOG)
        count_SV = _listed(ids_SK, truth.num_rows)
        count_SV[:, pinned_P] = 1
        pinned_S1 = truth.prob_SV[:, pinned_P].sum(1, keepdim=True)
        inside = torch.cat([pinned_S1, prob_SK], 1).cumsum(1)
        near_X = (truth.mass_S1[:, 0] - inside[:, -1] < DIFFERENCE_FROM).nonzero()[:, 0]

        def outside(
            values_SV: torch.Tensor, total_S1: torch.Tensor, ranked_SK: torch.Tensor
        ) -> torch.Tensor:
            pinned_S1 = values_SV[:, pinned_P].sum(1, keepdim=True)
            rest_S1 = total_S1 - pinned_S1 - ranked_SK.sum(1, keepdim=True)
            # Where nearly nothing is left, a difference has lost it: what is left is added up.
            left_XV = values_SV[near_X].masked_fill(count_SV[near_X] > 0, 0)
            rest_S1[near_X] = left_XV.sum(1, keepdim=True)
            return torch.cat([rest_S1, ranked_SK.flip(1)], 1).cumsum(1).flip(1)

        best_S1 = _best_outside(truth, count_SV)[:, None]
        return cls(
            truth=truth,
            ids_SK=ids_SK,
            pinned_P=pinned_P,
            num_ranked_S=(~is_none_SK).sum(1),
            inside=inside,
            outside=outside(truth.prob_SV, truth.mass_S1, prob_SK),
            entropy_outside=outside(truth.entropy_SV, truth.entropy_S1, entropy_SK),
            best_outside=torch.cat([best_S1, logp_SK.flip(1)], 1).cummax(1).values.flip(1),
        )

    def counts(self, size_SN: torch.Tensor) -> torch.Tensor:
        """Return how many of the ranking each set of a wanted size holds, int64 [S, N]."""
        return torch.minimum(size_SN, self.num_ranked_S[:, None])

    def scored(self, count_SN: torch.Tensor) -> Scored:
        """Return what the logits of the sets say, and nothing else."""
        logits_SV = self.truth.logits_SV.double()
        pinned_SP = logits_SV[:, self.pinned_P]
        ranked_SK = logits_SV.gather(1, self.ids_SK.clamp_min(0))
        ranked_SK.masked_fill_(self.ids_SK < 0, -torch.inf)
        nothing_S1 = ranked_SK.new_full((len(ranked_SK), 1), -torch.inf)
        first_S1 = torch.cat([nothing_S1, pinned_SP], 1).amax(1, keepdim=True)
        total_S1 = torch.cat([nothing_S1, pinned_SP], 1).logsumexp(1, keepdim=True)
        best = torch.cat([first_S1, ranked_SK], 1).cummax(1).values
        total = torch.cat([total_S1, ranked_SK], 1).logcumsumexp(1)
        return Scored(
            ids_SK=self.ids_SK,
            count_SN=count_SN,
            pinned_P=self.pinned_P,
            best_SN=best.gather(1, count_SN),
            logsumexp_SN=total.gather(1, count_SN),
        )

    def covered(self, count_SN: torch.Tensor, is_whole_SN: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what sets cover, by column of ``schema.CANDIDATES``.

        Parameters
        ----------
        count_SN
            Tokens of the ranking in each set.
        is_whole_SN
            Steps at which all tokens are candidates after all.

        Returns
        -------
        dict
            [S, N] each: bool for hits, int64 for ``set_size``, float64 for the rest.

        Notes
        -----
        With q = p / m on the set, KL(q || p) = -ln m. ``backoff_kl_nats`` is KL(p || q') with q' = p
        on the set and 1 - m spread evenly over the other tokens, the best back-off of its kind; it is
        (1 - m) KL(rest || even). ``nll_backoff`` is the surprisal under q'. A sampler's set is
        covered if the likeliest token outside is less likely than its last.
        """
        truth, num_rows = self.truth, self.truth.num_rows
        size_SN = (count_SN + len(self.pinned_P)).masked_fill(is_whole_SN, num_rows)
        inside_SN = self.inside.gather(1, count_SN)
        # A sum of rounded probabilities may come out above 1.
        outside_SN = self.outside.gather(1, count_SN).clamp_max(1)
        outside_SN = outside_SN.masked_fill(size_SN == num_rows, 0)
        best_SN = self.best_outside.gather(1, count_SN).masked_fill(is_whole_SN, -torch.inf)
        log_rest_SN = (num_rows - size_SN).clamp_min(1).double().log()
        spread_SN = torch.xlogy(outside_SN, outside_SN) - outside_SN * log_rest_SN
        entropy_SN = self.entropy_outside.gather(1, count_SN)
        backoff_SN = (-entropy_SN - spread_SN).clamp_min(0).masked_fill(outside_SN == 0, 0)
        has_chosen_SN = self._holds(truth.chosen_S, count_SN) | is_whole_SN
        nll_S1 = -truth.logp_SV.gather(1, truth.chosen_S[:, None])
        hits = {f"hit_{rule}": best_SN < truth.least_S[rule][:, None] for rule in RULES}
        return {
            "nll_full": nll_S1.expand_as(outside_SN),
            "set_size": size_SN,
            "hit_chosen": has_chosen_SN,
            "hit_argmax": self._holds(truth.best_S, count_SN) | is_whole_SN,
            **hits,
            "neg_log_mass_nats": _neg_log_mass(inside_SN, outside_SN),
            "missing_mass": outside_SN,
            "jsd_nats": jsd_of_mass_nats(1 - outside_SN).clamp_min(0),
            "backoff_kl_nats": backoff_SN,
            "nll_backoff": torch.where(has_chosen_SN, nll_S1, log_rest_SN - outside_SN.log()),
        }

    def _holds(self, token_S: torch.Tensor, count_SN: torch.Tensor) -> torch.Tensor:
        """Return whether a token of each step is in each set, bool [S, N]."""
        is_pinned_S1 = torch.isin(token_S, self.pinned_P)[:, None]
        is_it_SK = self.ids_SK == token_S[:, None]
        never_S1 = is_it_SK.new_ones((len(is_it_SK), 1))
        place_S1 = torch.cat([is_it_SK, never_S1], 1).int().argmax(1, keepdim=True)
        is_there_S1 = is_it_SK.any(1, keepdim=True)
        return is_pinned_S1 | (is_there_S1 & (place_S1 < count_SN))


def _beside_pinned(ids_SK: torch.Tensor, pinned_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the ids that are tokens and not pinned, in order, -1 behind them."""
    if ids_SK.numel() and int(ids_SK.max()) >= num_rows:
        msg = f"a ranking holds token {int(ids_SK.max())} of a head of {num_rows} rows."
        raise TracekitError(msg)
    is_pinned_V = torch.zeros(num_rows, dtype=torch.bool)
    is_pinned_V[pinned_P] = True
    return packed(ids_SK, (ids_SK >= 0) & ~is_pinned_V[ids_SK])


def _listed(ids_SK: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return how often each ranking holds each token, int16 [S, V]: once, or not at all."""
    count_SV = torch.zeros((len(ids_SK), num_rows + 1), dtype=torch.int16)
    slot_SK = torch.where(ids_SK < 0, num_rows, ids_SK)
    count_SV.scatter_add_(1, slot_SK, count_SV.new_ones(1).expand_as(slot_SK))
    count_SV[:, num_rows] = 1
    if (count_SV.gather(1, slot_SK) != 1).any():
        msg = "a ranking holds a token twice."
        raise TracekitError(msg)
    return count_SV[:, :num_rows]


def _best_outside(truth: Truth, count_SV: torch.Tensor) -> torch.Tensor:
    """Return the largest ln p outside of each whole ranking; -inf where nothing is."""
    is_outside_SK = count_SV.gather(1, truth.top_SK) == 0
    at_S1 = is_outside_SK.int().argmax(1, keepdim=True)
    best_S = truth.logp_SV.gather(1, truth.top_SK.gather(1, at_S1))[:, 0]
    # Most rankings leave out one of the most likely tokens; the others are looked at whole.
    if len(open_X := (~is_outside_SK.any(1)).nonzero()[:, 0]):
        left_XV = truth.logp_SV[open_X].masked_fill(count_SV[open_X] > 0, -torch.inf)
        best_S[open_X] = left_XV.amax(1)
    return best_S


def _neg_log_mass(inside_SN: torch.Tensor, outside_SN: torch.Tensor) -> torch.Tensor:
    """Return -ln m from the smaller of the two sums, which holds all that is known of it."""
    return torch.where(outside_SN < 0.5, -torch.log1p(-outside_SN), -inside_SN.log())
