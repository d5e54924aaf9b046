"""Score estimators on one sequence: exact logits once, shared by all estimators and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import InputError, TracekitError, UsageError
from tracekit.measure.logits import best_ids, has_distribution
from tracekit.measure.memo import Memo
from tracekit.vocab.budget import asked
from tracekit.vocab.coverage import Prefixes
from tracekit.vocab.estimator import Cost
from tracekit.vocab.truth import Truth
from tracekit.vocab.view import Known, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from tracekit.vocab.budget import Asked
    from tracekit.vocab.check import Check
    from tracekit.vocab.estimator import Estimator
    from tracekit.vocab.others import Others
    from tracekit.vocab.scheme import Scheme
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


@dataclass(eq=False)
class Tried:
    """What a scheme's sets cover at each step, and what naming them costs.

    Parameters
    ----------
    asked
        The scheme and its sizes.
    columns
        float64, int64 or bool [S, N] by column of ``schema.CANDIDATES``.
    cost_N
        Cost a step beside the rows of the head, mean over the steps.
    samples
        Rankings of a few steps, without pinned tokens, by number of the step.
    """

    asked: Asked
    columns: dict[str, np.ndarray]
    cost_N: list[Cost]
    samples: dict[int, np.ndarray]


@dataclass(eq=False)
class _Group:
    """Schemes of one estimator, which is asked once a block for all of them.

    By scheme: the columns of each block, and the sum over steps of the cost of each size.
    """

    estimator: Estimator
    asked: list[Asked]
    memory: dict[str, Any] = field(default_factory=dict)
    covered: dict[int, list[dict[str, torch.Tensor]]] = field(default_factory=dict)
    costs: dict[int, list[Cost]] = field(default_factory=dict)
    samples: dict[int, np.ndarray] = field(default_factory=dict)


def evaluate(
    schemes: Sequence[Scheme],
    sizes: Sequence[int],
    *,
    recorded: Recorded,
    decoder: Decoder,
    others: Others,
) -> list[Tried]:
    """Return what each scheme covers at each size, step by step.

    Parameters
    ----------
    schemes
        What is tried. Give the same decoder for all sequences of a trace: it keeps what estimators
        make of the head.
    sizes
        Candidates asked for, each at least 1, beside the pinned ones; from V on all tokens are
        candidates. Smaller sets are prefixes of larger ones.
    recorded
        The sequence.
    decoder
        The model's head and what belongs to it.
    others
        Texts of other prompts.

    Returns
    -------
    list of Tried
        Schemes in the order given, with a controller once a fit; nothing if no step is scored.

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
    if not len(recorded.scored_S):
        return []
    groups: dict[str, _Group] = {}
    for scheme in schemes:
        group = groups.setdefault(scheme.estimator.text, _Group(scheme.estimator, []))
        group.asked += asked(scheme, sizes, recorded, others)
    parts = [part for one in groups.values() for part in one.estimator.parts]
    num_top = max((part.needs.previous for part in parts), default=0)
    start = 0
    for block in blocks(recorded, decoder, others, num_top=num_top):
        truth = Truth.of(block.logits_SV, block.chosen_S)
        end = start + len(block.chosen_S)
        for group in groups.values():
            _cover(group, block, truth, slice(start, end), sizes)
        start = end
    tried = [one for group in groups.values() for one in _tried(group)]
    order = {scheme.text: place for place, scheme in enumerate(schemes)}
    return sorted(tried, key=lambda one: order[one.asked.scheme.text])


def facts(recorded: Recorded, decoder: Decoder, others: Others) -> dict[str, np.ndarray]:
    """Return what is true of each scored step whatever the set, [S] by column of ``schema.SCORED``.

    Parameters
    ----------
    recorded, decoder, others
        As for ``evaluate``.
    """
    parts = [
        {"position": block.known.rows_S + 1} | Truth.of(block.logits_SV, block.chosen_S).facts()
        for block in blocks(recorded, decoder, others, num_top=0)
    ]
    return _joined(parts) if parts else {}


def sampled_steps(num_steps: int) -> list[int]:
    """Return the steps whose rankings are kept, for batches of several sequences: two, a third in."""
    return sorted({num_steps // 3, 2 * num_steps // 3})


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


def _cover(group: _Group, block: Block, truth: Truth, steps: slice, sizes: Sequence[int]) -> None:
    """Rank once, and look at the sets of all schemes of an estimator."""
    known, num_rows = block.known, truth.num_rows
    wanted = [one.size_SN[steps] for one in group.asked]
    # Sets of all tokens need no ranking.
    most = max(int(size_SN.masked_fill(size_SN >= num_rows, 1).max()) for size_SN in wanted)
    # Pinned tokens take places in it.
    limit = min(most + len(known.decoder.pinned_P), num_rows)
    try:
        ids_SK = group.estimator.candidates(known, group.memory, block.logits_SV, limit)
        prefixes = Prefixes.of(truth, ids_SK, known.decoder.pinned_P, most)
        prices = [group.estimator.price(known, group.memory, min(size, num_rows)) for size in sizes]
    except TracekitError as error:
        msg = f"estimator {group.estimator.text}: {error}"
        raise TracekitError(msg) from error
    num_steps = len(block.chosen_S)
    for step in sampled_steps(len(group.asked[0].size_SN)):
        if steps.start <= step < steps.stop:
            ids_K = prefixes.ids_SK[step - steps.start]
            group.samples[step] = ids_K[ids_K >= 0].numpy()
    for place, (one, size_SN) in enumerate(zip(group.asked, wanted, strict=True)):
        count_SN, is_whole_SN = prefixes.counts(size_SN), size_SN >= num_rows
        is_unsure_SN, check_cost = _checked(one.scheme.check, known, prefixes, count_SN)
        is_unsure_SN &= ~is_whole_SN
        columns = prefixes.covered(count_SN, is_whole_SN | is_unsure_SN)
        group.covered.setdefault(place, []).append(columns | {"is_fallback": is_unsure_SN})
        spent = group.costs.setdefault(place, [Cost()] * len(sizes))
        group.costs[place] = [
            sum_N + (price + check_cost) * num_steps
            for sum_N, price in zip(spent, prices, strict=True)
        ]


def _checked(
    check: Check | None, known: Known, prefixes: Prefixes, count_SN: torch.Tensor
) -> tuple[torch.Tensor, Cost]:
    """Return where a check is not sure, bool [S, N], and what it costs."""
    if check is None:
        return torch.zeros_like(count_SN, dtype=torch.bool), Cost()
    view = View(known, check.needs, check.text, {})
    return ~check.is_sure(view, prefixes.scored(count_SN)), check.cost(view)


def _tried(group: _Group) -> Iterator[Tried]:
    """Yield a group's schemes with their blocks put together."""
    for place, one in enumerate(group.asked):
        num_steps = len(one.size_SN)
        cost_N = [cost * (1 / num_steps) for cost in group.costs[place]]
        yield Tried(one, _joined(group.covered[place]), cost_N, group.samples)


def _joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
