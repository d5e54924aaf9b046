"""Keys that are read often, of late, and by heads that agree stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.accumulate import LastRead, Reads, ReceivedByHead
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View

LEAST_AGREEMENT = 1e-6
"""Agreement of heads that put a key at opposite ends, so that it has a logarithm."""


@SCORERS.register("redundancy")
@dataclass(frozen=True)
class Redundancy(Scorer):
    """Score = reads a row in standard units, times the heads' agreement, over 1 + rounds unread.

    Serves ``redundancy``, tracekit's own: an entry is redundant if few rows read it, if the heads
    that share it disagree on its worth, and if its last read is long ago.

    - Reads: rows that gave it more than an even share in at least one query head of the group, over
      the rows that could see it; z, standardised over the keys that the head holds (0 if all are
      equal). Since z is negative for half of the keys, where a division would help instead of
      harm, exp(z) takes its place: the score is exp(z) * agreement / (1 + rounds), here as the sum
      of logarithms, which orders keys alike and cannot overflow.
    - Agreement: 1 - |rank - rank'| / (keys held - 1), mean over the pairs of query heads of the
      group, of ranks by attention received so far (ties share their mean rank). The group and not
      the layer, since its heads alone hold the same keys; 1 where there is but one query head.
    - Rounds: ``round_tokens`` tokens each since the last read, or since the key was written if
      there was none, whole ones. By tokens and not by decisions, so that it has a meaning at the
      first decision already: give it the value of ``every``.

    In layers from ``deep_layer`` on only keys that are unread for ``rounds`` rounds are candidates
    at first: all others come before them. Floors by depth come with ``layers=tiers``.

    Parameters
    ----------
    round_tokens
        Tokens of a round.
    rounds
        Rounds unread that make a key of a deep layer a candidate.
    deep_layer
        Number of the first deep layer; -1: none is deep. A scorer does not know how many layers
        there are, so this is no fraction.
    """

    round_tokens: int = 64
    rounds: int = 2
    deep_layer: int = -1

    presets: ClassVar = (
        Preset(
            name="redundancy",
            sinks=4,
            recent="32",
            schedule=(("every", "64"), ("from", "prompt")),
            items=(
                ("layers", "tiers"),
                ("shallow", "0.2"),
                ("deep", "0.7"),
                ("deep_from", "0.67"),
            ),
        ),
    )

    def __post_init__(self) -> None:
        if self.round_tokens < 1 or self.rounds < 1 or self.deep_layer < -1:
            msg = (
                f"round_tokens={self.round_tokens} and rounds={self.rounds} must be at least 1, and "
                f"deep_layer={self.deep_layer} is the number of a layer, or -1 for none."
            )
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """Reads, the last of them, and what each head gave."""
        return Needs(accumulated=(Reads(), LastRead(), ReceivedByHead()))

    def score(self, view: View) -> torch.Tensor:
        """Return the logarithms, float64 [N, L, G, K]."""
        age_K = view.num_tokens - view.position_K
        reads_NLGK = view.total_NLXK(Reads()).double() / age_K
        received_NLHK = view.total_NLXK(ReceivedByHead())
        received_NLGMK = received_NLHK.unflatten(2, (-1, view.layer.group_size))
        agreement_NLGK = _agreement(received_NLGMK, view.held_NLGK).clamp(min=LEAST_AGREEMENT)
        last_NLGK = torch.maximum(view.total_NLXK(LastRead()).long(), view.position_K + 1)
        unread_NLGK = (view.num_tokens - last_NLGK) // self.round_tokens
        score_NLGK = _standardised(reads_NLGK, view.held_NLGK)
        score_NLGK = score_NLGK + agreement_NLGK.log() - unread_NLGK.double().log1p()
        return self._raised(score_NLGK, unread_NLGK < self.rounds, view)

    def _raised(
        self, score_NLGK: torch.Tensor, is_read_NLGK: torch.Tensor, view: View
    ) -> torch.Tensor:
        """Return scores in which the read keys of deep layers are above all others of their head."""
        deep = [self.deep_layer != -1 and layer >= self.deep_layer for layer in view.layers]
        is_deep_L11 = torch.tensor(deep, device=score_NLGK.device)[:, None, None]
        low_NLG1, high_NLG1 = _ends(score_NLGK, view.held_NLGK)
        return score_NLGK + (high_NLG1 - low_NLG1 + 1) * (is_deep_L11 & is_read_NLGK)


def _standardised(value_NLGK: torch.Tensor, held_NLGK: torch.Tensor) -> torch.Tensor:
    """Return values less their mean over held keys, over their deviation; 0 if all are equal."""
    num_NLG1 = held_NLGK.sum(-1, keepdim=True)
    mean_NLG1 = value_NLGK.where(held_NLGK, 0).sum(-1, keepdim=True) / num_NLG1
    off_NLGK = (value_NLGK - mean_NLG1).where(held_NLGK, 0)
    deviation_NLG1 = (off_NLGK.square().sum(-1, keepdim=True) / num_NLG1).sqrt()
    low_NLG1, high_NLG1 = _ends(value_NLGK, held_NLGK)
    return torch.where(high_NLG1 > low_NLG1, off_NLGK / deviation_NLG1, 0)


def _agreement(received_NLGMK: torch.Tensor, held_NLGK: torch.Tensor) -> torch.Tensor:
    """Return 1 - the mean difference of ranks over pairs of the group's heads, of the most possible."""
    group_size = received_NLGMK.shape[3]
    if group_size == 1:
        return torch.ones_like(held_NLGK, dtype=torch.float64)
    # Ties must be ties whatever the order of the sums: float32 decides. Evicted keys come last.
    worth = received_NLGMK.float().masked_fill(~held_NLGK[..., None, :], torch.inf).contiguous()
    ordered = worth.sort(dim=-1).values
    first, last = (torch.searchsorted(ordered, worth, right=right) for right in (False, True))
    rank_MNLGK = ((first + last - 1).double() / 2).movedim(3, 0).sort(dim=0).values
    # In a sorted list the m-th is the larger of m pairs and the smaller of the others.
    sign_M = 2 * torch.arange(group_size, device=rank_MNLGK.device).double() - (group_size - 1)
    difference_NLGK = torch.einsum("m,mnlgk->nlgk", sign_M, rank_MNLGK)
    num_pairs = group_size * (group_size - 1) / 2
    most_NLG1 = (held_NLGK.sum(-1, keepdim=True) - 1).clamp(min=1)
    return 1 - difference_NLGK / num_pairs / most_NLG1


def _ends(value_NLGK: torch.Tensor, held_NLGK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and the highest value of a held key, [N, L, G, 1] each."""
    low_NLG1 = value_NLGK.masked_fill(~held_NLGK, torch.inf).amin(-1, keepdim=True)
    high_NLG1 = value_NLGK.masked_fill(~held_NLGK, -torch.inf).amax(-1, keepdim=True)
    return low_NLG1, high_NLG1
