"""Score estimators on one sequence: exact logits once, shared by all estimators and sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit.errors import TracekitError, UsageError
from tracekit.vocab.blocks import blocks
from tracekit.vocab.budget import asked
from tracekit.vocab.coverage import Prefixes
from tracekit.vocab.estimator import Cost
from tracekit.vocab.truth import Truth
from tracekit.vocab.view import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.vocab.blocks import Block
    from tracekit.vocab.budget import Asked
    from tracekit.vocab.check import Check
    from tracekit.vocab.estimator import Estimator
    from tracekit.vocab.others import Others
    from tracekit.vocab.scheme import Scheme
    from tracekit.vocab.view import Decoder, Known
    from tracekit.vocab.view import Sequence as Recorded


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
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    cost_N: list[Cost] = field(default_factory=list)
    samples: dict[int, np.ndarray] = field(default_factory=dict)

    def write(self, steps: slice, columns: dict[str, torch.Tensor], cost_N: list[Cost]) -> None:
        """Take in what was found at some steps."""
        num_steps, num_sizes = self.asked.size_SN.shape
        for name, values_SN in columns.items():
            # Whole at once: a piece kept from each block would hold on to the memory around it.
            if name not in self.columns:
                dtype = values_SN.numpy().dtype
                self.columns[name] = np.empty((num_steps, num_sizes), dtype)
            self.columns[name][steps] = values_SN.numpy()
        share = (steps.stop - steps.start) / num_steps
        before_N = self.cost_N or [Cost()] * num_sizes
        self.cost_N = [one + more * share for one, more in zip(before_N, cost_N, strict=True)]


@dataclass(eq=False)
class _Group:
    """Schemes of one estimator, which is asked once a block for all of them."""

    estimator: Estimator
    tried: list[Tried] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)


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
        group = groups.setdefault(scheme.estimator.text, _Group(scheme.estimator))
        group.tried += map(Tried, asked(scheme, sizes, recorded, others))
    parts = [part for one in groups.values() for part in one.estimator.parts]
    num_top = max((part.needs.previous for part in parts), default=0)
    start = 0
    for block in blocks(recorded, decoder, others, num_top=num_top):
        truth = Truth.of(block.logits_SV, block.chosen_S)
        end = start + len(block.chosen_S)
        for group in groups.values():
            _cover(group, block, truth, slice(start, end), sizes)
        start = end
    tried = [one for group in groups.values() for one in group.tried]
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
    names = parts[0] if parts else ()
    return {name: torch.cat([part[name] for part in parts]).numpy() for name in names}


def sampled_steps(num_steps: int) -> list[int]:
    """Return the steps whose rankings are kept, for batches of several sequences: two, a third in."""
    return sorted({num_steps // 3, 2 * num_steps // 3})


def _cover(group: _Group, block: Block, truth: Truth, steps: slice, sizes: Sequence[int]) -> None:
    """Rank once, and look at the sets of all schemes of an estimator."""
    known, num_rows = block.known, truth.num_rows
    wanted = [one.asked.size_SN[steps] for one in group.tried]
    # Sets of all tokens need no ranking.
    most = max(int(size_SN.masked_fill(size_SN >= num_rows, 1).max()) for size_SN in wanted)
    # Pinned tokens take places in it.
    limit = min(most + len(known.decoder.pinned_P), num_rows)
    shared = (known.sequence.hidden_TE, known.sequence.token_ids_T, known.rows_S, block.logits_SV)
    before = [one._version for one in shared]
    try:
        ids_SK = group.estimator.candidates(known, group.memory, block.logits_SV, limit)
        prefixes = Prefixes.of(truth, ids_SK, known.decoder.pinned_P, most)
        prices = [group.estimator.price(known, group.memory, min(size, num_rows)) for size in sizes]
        if [one._version for one in shared] != before:
            msg = "it changed, in place, what all estimators read: let it work on a copy."
            raise TracekitError(msg)
        if not all(0 <= one.bytes < math.inf and 0 <= one.macs < math.inf for one in prices):
            msg = f"it names a cost that is none: {prices[0]}."
            raise TracekitError(msg)
    except TracekitError as error:
        msg = f"estimator {group.estimator.text}: {error}"
        raise TracekitError(msg) from error
    for one, size_SN in zip(group.tried, wanted, strict=True):
        count_SN, is_whole_SN = prefixes.counts(size_SN), size_SN >= num_rows
        is_unsure_SN, check_cost = _checked(one.asked.scheme.check, known, prefixes, count_SN)
        is_unsure_SN &= ~is_whole_SN
        columns = prefixes.covered(count_SN, is_whole_SN | is_unsure_SN)
        columns |= {"is_fallback": is_unsure_SN}
        one.write(steps, columns, [price + check_cost for price in prices])
        for step in sampled_steps(len(one.asked.size_SN)):
            if steps.start <= step < steps.stop:
                ids_K = prefixes.ids_SK[step - steps.start]
                one.samples[step] = ids_K[ids_K >= 0].numpy()


def _checked(
    check: Check | None, known: Known, prefixes: Prefixes, count_SN: torch.Tensor
) -> tuple[torch.Tensor, Cost]:
    """Return where a check is not sure, bool [S, N], and what it costs."""
    if check is None:
        return torch.zeros_like(count_SN, dtype=torch.bool), Cost()
    view = View(known, check.needs, check.text, {})
    return ~check.is_sure(view, prefixes.scored(count_SN)), check.cost(view)
