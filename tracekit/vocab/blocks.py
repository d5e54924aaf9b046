"""The scored steps of a sequence in blocks: what is known before, and the logits that came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tracekit.errors import InputError
from tracekit.measure.logits import best_ids, has_distribution
from tracekit.measure.memo import Memo
from tracekit.vocab.view import Known

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.vocab.others import Others
    from tracekit.vocab.view import Decoder
    from tracekit.vocab.view import Sequence as Recorded

BLOCK_NUMBERS = 1 << 22
"""Logits in one block; with their float64 copies and masks it stays below 300 MB."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """Some scored steps: what is known before, and the logits and tokens that came."""

    known: Known
    logits_SV: torch.Tensor
    chosen_S: torch.Tensor


def runs_of(scored_S: torch.Tensor) -> torch.Tensor:
    """Return the rows at which the head ran: the scored ones and the one before each, int64 [R]."""
    runs_R: torch.Tensor = torch.cat([scored_S, scored_S - 1]).unique()
    return runs_R[runs_R >= 0]


def blocks(
    recorded: Recorded, decoder: Decoder, others: Others, *, num_top: int
) -> Iterator[Block]:
    """Yield the scored steps in order, as many at a time as memory allows.

    Parameters
    ----------
    recorded, decoder, others
        As for ``evaluate``.
    num_top
        Most likely tokens of each run of the head that later steps may see.

    Raises
    ------
    InputError
        If a step has no next-token distribution.
    """
    head, scored_S = decoder.head, recorded.scored_S
    runs_R = runs_of(scored_S)
    top: list[torch.Tensor] = []
    num_seen = 0
    for rows_R in runs_R.split(max(1, BLOCK_NUMBERS // head.spec.num_rows)):
        logits_RV = head.logits(recorded.hidden_TE[rows_R]).cpu()
        if len(wrong_R := rows_R[~has_distribution(logits_RV)]):
            msg = f"the logits of position {wrong_R[0]} hold NaN or infinity: record it again."
            raise InputError(msg)
        top.append(best_ids(logits_RV, num_top) if num_top else rows_R.new_empty(len(rows_R), 0))
        is_scored_R = torch.isin(rows_R, scored_S)
        rows_S = rows_R[is_scored_R]
        if not len(rows_S):
            continue
        num_runs_S = torch.searchsorted(runs_R, rows_S)
        top_RM = torch.cat(top)
        # Only what no step has been shown is kept: memory does not grow with the steps.
        num_now = int(num_runs_S[-1]) - num_seen
        yield Block(
            known=Known(
                sequence=recorded,
                decoder=decoder,
                others=others,
                rows_S=rows_S,
                top_RM=top_RM[:num_now],
                num_runs_S=num_runs_S - num_seen,
                memo=Memo(),
            ),
            logits_SV=logits_RV[is_scored_R],
            chosen_S=recorded.token_ids_T[rows_S + 1],
        )
        top, num_seen = [top_RM[num_now:]], num_seen + num_now
