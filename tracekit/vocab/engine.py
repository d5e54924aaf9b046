"""Score estimators on one sequence: exact logits once, shared by all estimators and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tracekit.errors import InputError, TracekitError, UsageError
from tracekit.measure.logits import best_ids, has_distribution
from tracekit.vocab.coverage import Truth, coverage
from tracekit.vocab.fit import Fit, OtherPrompts
from tracekit.vocab.view import Known

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.measure.head import Head
    from tracekit.vocab.estimator import Estimator

__all__ = ["Fit", "VocabCell", "blocks", "evaluate"]

BLOCK_NUMBERS = 1 << 20
"""Logits in one block; with their float64 copies and masks it stays below 100 MB."""


@dataclass(frozen=True, kw_only=True)
class VocabCell:
    """One estimator at one size on one sequence; fields are columns of ``schema.VOCAB_RESULTS``."""

    estimator: str
    size: int
    hit_chosen: float
    hit_argmax: float
    mass: float
    neg_log_mass_nats: float
    set_size_mean: float
    cost_frac: float
    macs_frac: float
    nll_full: float
    nll_backoff: float
    num_scored: int


@dataclass(frozen=True, eq=False)
class Block:
    """Some scored steps: what is known before, and the logits and tokens that came."""

    known: Known
    logits_SV: torch.Tensor
    chosen_S: torch.Tensor


def evaluate(
    estimators: Sequence[Estimator],
    sizes: Sequence[int],
    *,
    hidden_TE: torch.Tensor,
    token_ids_T: torch.Tensor,
    scored_S: torch.Tensor,
    head: Head,
    pinned_ids: torch.Tensor,
    fit: OtherPrompts,
) -> list[VocabCell]:
    """Return what each estimator covers at each size, mean over the scored steps.

    Parameters
    ----------
    estimators
        Estimators; what one of them computes from the head alone is kept there
        (``Head.truncated``), so give the same head for all sequences of a trace.
    sizes
        Candidates asked for, each at least 1, beside the pinned ones; from V on all tokens are
        candidates. Smaller sets are prefixes of larger ones.
    hidden_TE
        Final hidden states [T, E]; row t predicts token t + 1.
    token_ids_T
        Token ids, int64, one more than rows at least.
    scored_S
        Rows of the scored steps. The head ran at these rows and at the row before each of them
        (the last of a prompt), and nowhere else.
    head
        The language-model head.
    pinned_ids
        Tokens that are always candidates: special ones, bytes.
    fit
        Token counts of other prompts.

    Returns
    -------
    list of VocabCell
        Estimators in the order given, sizes in the order given within each; empty if nothing is
        scored.

    Raises
    ------
    UsageError
        If there is no size, or one below 1.
    InputError
        If a scored step, or the one before it, has no next-token distribution.
    TracekitError
        If an estimator reads what it did not declare, or ranks a token twice.
    """
    if min(sizes, default=0) < 1:
        msg = f"candidate-set sizes are {list(sizes)}: give at least one, each 1 or more."
        raise UsageError(msg)
    pinned_P = pinned_ids.unique()
    limit = min(max(sizes) + len(pinned_P), head.spec.num_rows)
    covered: list[list[dict[str, torch.Tensor]]] = [[] for _ in estimators]
    for block in blocks(
        hidden_TE=hidden_TE,
        token_ids_T=token_ids_T,
        scored_S=scored_S,
        head=head,
        fit=fit,
        num_top=max((one.needs.previous for one in estimators), default=0),
    ):
        truth = Truth.of(block.logits_SV, block.chosen_S, pinned_P)
        for one, parts in zip(estimators, covered, strict=True):
            ids_SK = one.candidates(block.known, block.logits_SV, limit)
            try:
                parts.append(coverage(truth, ids_SK, sizes))
            except TracekitError as error:
                msg = f"estimator {one.text}: {error}"
                raise TracekitError(msg) from error
    if not len(scored_S):
        return []
    return [
        _cell(one, size, n, parts, head)
        for one, parts in zip(estimators, covered, strict=True)
        for n, size in enumerate(sizes)
    ]


def blocks(
    *,
    hidden_TE: torch.Tensor,
    token_ids_T: torch.Tensor,
    scored_S: torch.Tensor,
    head: Head,
    fit: OtherPrompts,
    num_top: int,
) -> Iterator[Block]:
    """Yield the scored steps in order, as many at a time as memory allows.

    Parameters
    ----------
    hidden_TE, token_ids_T, scored_S, head, fit
        As for ``evaluate``.
    num_top
        Most likely tokens of each run of the head that later steps may see.

    Raises
    ------
    InputError
        If a step has no next-token distribution.
    """
    runs_R = torch.cat([scored_S, scored_S - 1]).unique()
    runs_R = runs_R[runs_R >= 0]
    top: list[torch.Tensor] = []
    for rows_R in runs_R.split(max(1, BLOCK_NUMBERS // head.spec.num_rows)):
        logits_RV = head.logits(hidden_TE[rows_R]).cpu()
        if len(wrong_R := rows_R[~has_distribution(logits_RV)]):
            msg = f"the logits of position {wrong_R[0]} hold NaN or infinity: record it again."
            raise InputError(msg)
        top.append(best_ids(logits_RV, num_top) if num_top else rows_R.new_empty(len(rows_R), 0))
        is_scored_R = torch.isin(rows_R, scored_S)
        rows_S = rows_R[is_scored_R]
        if not len(rows_S):
            continue
        num_runs_S = torch.searchsorted(runs_R, rows_S)
        known = Known(
            hidden_SE=hidden_TE[rows_S],
            token_ids_T=token_ids_T[: int(rows_S[-1]) + 1],
            rows_S=rows_S,
            top_RM=torch.cat(top)[: int(num_runs_S[-1])],
            num_runs_S=num_runs_S,
            head=head,
            fit=fit,
        )
        yield Block(known, logits_RV[is_scored_R], token_ids_T[rows_S + 1])


def _cell(
    estimator: Estimator, size: int, n: int, parts: list[dict[str, torch.Tensor]], head: Head
) -> VocabCell:
    """Return the means over steps at the n-th size, with the cost of the estimator's sets."""
    means = {
        name: float(torch.cat([part[name][:, n] for part in parts]).mean()) for name in parts[0]
    }
    count, cost = means["set_size_mean"], estimator.cost(head, size)
    return VocabCell(
        estimator=estimator.text,
        size=size,
        cost_frac=(count * head.bytes_per_row + cost.bytes) / head.num_bytes,
        macs_frac=(count * head.spec.hidden_size + cost.macs) / head.macs,
        num_scored=sum(len(part["mass"]) for part in parts),
        **means,
    )
