"""What a reduced cache does to next-token distributions: from final hidden states, step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.errors import UsageError
from tracekit.measure.conventions import EXACT, expectation, resolved
from tracekit.measure.logits import has_distribution
from tracekit.measure.token_rows import NextToken

if TYPE_CHECKING:
    from tracekit.measure.conventions import Convention
    from tracekit.measure.head import Head

__all__ = ["FullRows", "NextToken"]

KEPT_BYTES = 512 << 20
"""Logits of the full run that are kept; of a longer run they are computed anew for each cell."""

BLOCK_BYTES = 64 << 20
"""Logits of one product with the head."""

TILE_NUMBERS = 1 << 18
"""Logits that are widened to float64 at once: these stay in the processor's cache."""

SMALLEST = torch.finfo(torch.float64).tiny
"""In place of a probability of 0 under a logarithm."""


class _Facts(NamedTuple):
    """What all cells share of the full run, one number a row."""

    logsumexp_T: torch.Tensor
    nll_T: torch.Tensor
    top_T: torch.Tensor
    margin_T: torch.Tensor
    entropy_T: torch.Tensor
    is_bad_T: torch.Tensor

    def rows(self, chosen: slice) -> _Facts:
        return _Facts(*(column_T[chosen] for column_T in self))


class FullRows:
    """The scored rows of a sequence under the full cache, to which any number of cells compare.

    Parameters
    ----------
    hidden_RE
        Final hidden states, inputs of the head [R, E].
    head
        The language-model head.
    target_R
        Token that came after each row, int64 [R].
    convention
        How the full run is read.
    kept_bytes
        Bound of the logits of the full run that are kept for the next cell.

    Raises
    ------
    UsageError
        If rows and targets differ in number.

    Notes
    -----
    Logits are float32, all that follows is float64: a KL of 1e-10 has three digits, equal states
    give exactly 0. Memory: ``kept_bytes``, two blocks of ``BLOCK_BYTES`` and a few tiles.
    """

    def __init__(
        self,
        hidden_RE: torch.Tensor,
        head: Head,
        target_R: torch.Tensor,
        *,
        convention: Convention = EXACT,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        if target_R.shape != hidden_RE.shape[:1]:
            msg = f"{len(hidden_RE)} rows but {target_R.numel()} targets: give one a row."
            raise UsageError(msg)
        self._hidden_RE, self._head, self._convention = hidden_RE, head, convention
        self._target_R = target_R.to(head.weight_VE.device)
        self._size = max(1, BLOCK_BYTES // (4 * head.spec.num_rows))
        self._kept: list[torch.Tensor] = []
        keeps = 4 * head.spec.num_rows * len(hidden_RE) <= kept_bytes
        facts = []
        for rows in self._blocks:
            logits_TV = head.logits(hidden_RE[rows])
            facts += [
                _facts(logits_TV[tile], self._target_R[rows][tile], convention)
                for tile in _tiles(*logits_TV.shape)
            ]
            if keeps:
                self._kept.append(logits_TV)
        self._facts = _Facts(*(torch.cat(column) for column in zip(*facts, strict=True)))

    @property
    def _blocks(self) -> list[slice]:
        """Rows of each product with the head; one empty block if there are none."""
        starts = range(0, max(len(self._hidden_RE), 1), self._size)
        return [slice(start, start + self._size) for start in starts]

    def compare(self, hidden_RE: torch.Tensor) -> NextToken:
        """Return the measures of the same rows under a reduced cache.

        Parameters
        ----------
        hidden_RE
            Final hidden states [R, E].

        Raises
        ------
        UsageError
            If they are not of the shape of the full run's.
        """
        if hidden_RE.shape != self._hidden_RE.shape:
            msg = (
                f"states {list(hidden_RE.shape)} are compared with {list(self._hidden_RE.shape)}: "
                "give the same rows."
            )
            raise UsageError(msg)
        tiles = []
        for number, rows in enumerate(self._blocks):
            full_TV = self._kept[number] if self._kept else self._head.logits(self._hidden_RE[rows])
            pruned_TV = self._head.logits(hidden_RE[rows])
            facts, target_T = self._facts.rows(rows), self._target_R[rows]
            tiles += [
                _compare(
                    full_TV[tile],
                    pruned_TV[tile],
                    facts.rows(tile),
                    target_T[tile],
                    self._convention,
                )
                for tile in _tiles(*pruned_TV.shape)
            ]
        columns = {name: torch.cat([tile[name] for tile in tiles]) for name in tiles[0]}
        return NextToken(**{name: column_R.cpu().numpy() for name, column_R in columns.items()})


def _facts(logits_TV: torch.Tensor, target_T: torch.Tensor, convention: Convention) -> _Facts:
    """Return the facts of a tile; rows without a distribution become zeros in it."""
    is_bad_T = _blank_bad_rows(logits_TV)
    logp_TV, prob_TV, logsumexp_T = _distribution(logits_TV)
    base_TV = convention.base(logits_TV, logp_TV)
    best_T, top_T = logits_TV.max(1)
    second_T, _ = _best_other(logits_TV, top_T)
    return _Facts(
        logsumexp_T,
        -base_TV.gather(1, target_T[:, None])[:, 0],
        convention.top(logits_TV, base_TV),
        _margin(best_T, second_T, logits_TV.shape[1]),
        -expectation(prob_TV, logp_TV),
        is_bad_T,
    )


def _compare(
    full_TV: torch.Tensor,
    pruned_TV: torch.Tensor,
    facts: _Facts,
    target_T: torch.Tensor,
    convention: Convention,
) -> dict[str, torch.Tensor]:
    """Return the columns of a tile; rows without a distribution become zeros in both."""
    is_bad_T = facts.is_bad_T | _blank_bad_rows(full_TV) | _blank_bad_rows(pruned_TV)
    own_T = pruned_TV.gather(1, facts.top_T[:, None])[:, 0]
    other_T, other_id_T = _best_other(pruned_TV, facts.top_T)
    same_T = (own_T > other_T) | ((own_T == other_T) & (facts.top_T < other_id_T))
    logp_TV = full_TV.double() - facts.logsumexp_T[:, None]
    prob_TV = logp_TV.exp()
    logq_TV, probq_TV, _ = _distribution(pruned_TV)
    nll_T = -logq_TV.gather(1, target_T[:, None])[:, 0]
    columns = {
        "nll_full": facts.nll_T.clone(),
        "nll_pruned": nll_T,
        "kl_nats": convention.kl_nats(convention.base(full_TV, logp_TV), prob_TV, logq_TV),
        "jsd_nats": _jsd(prob_TV, probq_TV, facts.entropy_T - expectation(probq_TV, logq_TV)),
        "delta_p": (-nll_T).exp() - (-facts.nll_T).exp(),
        "entropy_full_nats": facts.entropy_T.clone(),
        "top1_margin_full": facts.margin_T.clone(),
        "margin_pruned": _margin(own_T, other_T, pruned_TV.shape[1]),
    }
    for column_T in columns.values():
        column_T[is_bad_T] = math.nan
    top_T = torch.where(same_T, facts.top_T, other_id_T)
    return columns | {
        "same_top": same_T & ~is_bad_T,
        "hit": (top_T == target_T) & ~is_bad_T,
        "hit_full": (facts.top_T == target_T) & ~is_bad_T,
    }


def _tiles(num_rows: int, width: int) -> list[slice]:
    """Return the rows of each tile; one empty tile if there are none."""
    size = max(1, TILE_NUMBERS // width)
    return [slice(start, start + size) for start in range(0, max(num_rows, 1), size)]


def _blank_bad_rows(logits_TV: torch.Tensor) -> torch.Tensor:
    """Set rows without a distribution to 0, in place, and return which these are, bool [T]."""
    is_bad_T = ~has_distribution(logits_TV)
    if bool(is_bad_T.any()):
        logits_TV[is_bad_T] = 0
    return is_bad_T


def _distribution(
    logits_TV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities, probabilities [T, V] and ln sum exp [T], in float64."""
    peak_T1 = logits_TV.amax(1, keepdim=True).double()
    logp_TV = logits_TV.double().sub_(peak_T1)
    prob_TV = logp_TV.exp()
    total_T1 = prob_TV.sum(1, keepdim=True)
    prob_TV /= total_T1
    logp_TV -= total_T1.log()
    return logp_TV, prob_TV, (peak_T1 + total_T1.log())[:, 0]


def _jsd(prob_TV: torch.Tensor, probq_TV: torch.Tensor, entropies_T: torch.Tensor) -> torch.Tensor:
    """Return the entropy of the mean less the mean of the two, given their sum."""
    middle_TV = (prob_TV + probq_TV).mul_(0.5)
    # torch's own entr is not vectorised.
    entropy_T = -middle_TV.clamp_min(SMALLEST).log_().mul_(middle_TV).sum(1)
    return resolved(entropy_T - entropies_T / 2).clamp_(max=math.log(2))


def _best_other(
    logits_TV: torch.Tensor, excluded_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logit of all tokens but one, and its id, the lower id of equals."""
    excluded_T1 = excluded_T[:, None]
    held_T1 = logits_TV.gather(1, excluded_T1)
    logits_TV.scatter_(1, excluded_T1, -math.inf)
    other_T, other_id_T = logits_TV.max(1)
    logits_TV.scatter_(1, excluded_T1, held_T1)
    return other_T, other_id_T


def _margin(own_T: torch.Tensor, other_T: torch.Tensor, width: int) -> torch.Tensor:
    """Return how far one logit is above the other, float64; NaN where there is one token only."""
    margin_T = own_T.double() - other_T.double()
    return margin_T if width > 1 else margin_T.fill_(math.nan)
