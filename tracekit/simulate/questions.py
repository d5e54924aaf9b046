"""The questions that a plan asks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from tracekit.simulate.attended import attended_tables
from tracekit.simulate.attention import attention_rows
from tracekit.simulate.layers import sweep_sequence
from tracekit.simulate.levels import Local, Predicted, Propagated
from tracekit.simulate.question import Answers, Question, Tables, all_or_each, seed_of
from tracekit.simulate.recorded_model import RecordedModel
from tracekit.simulate.stacks import why_no_layer
from tracekit.simulate.vocab import VocabReplay
from tracekit.simulate.weights import Weights
from tracekit.trace import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

    from tracekit.progress import Progress
    from tracekit.simulate.layer_plan import Sweep
    from tracekit.simulate.plan import Plan
    from tracekit.trace.reader import Trace


class Vocabulary(Question):
    """What candidate sets of an estimator cover, at all sizes."""

    name = "vocab"
    tables = ("vocab", "candidates", "candidate_sets")
    why_not = "no step was decoded there"

    def __init__(self, trace: Trace, replay: VocabReplay, plan: Plan) -> None:
        self._plan, self._replay = plan, replay
        # A trace may have grown since the others were read.
        names = ",".join(trace.sequence_ids).encode()
        self._others = hashlib.sha256(names).hexdigest()
        sizes = ",".join(map(str, plan.sizes))
        self._schemes = {f"{one.text}: {sizes}": one for one in plan.schemes}

    @property
    def cells(self) -> list[str]:
        """Estimators, each with what sets its size."""
        return list(self._schemes)

    def content(self, cell: str) -> str:
        """Return a hash of the names of all sequences, if the cell hangs on other prompts."""
        return self._others if self._schemes[cell].reads_others else ""

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return estimators, computed together: they share the logits."""
        schemes = {cell: self._schemes[cell] for cell in cells}
        why = {cell: self._replay.why_not(one, sequence) for cell, one in schemes.items()}
        skipped = {cell: reason for cell, reason in why.items() if reason is not None}
        able = [cell for cell in cells if why[cell] is None]
        if not able:
            return Answers(skipped=skipped)
        decoder = self._replay.decoder

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            chosen = [schemes[cell] for cell in some]
            made = self._replay.sequence(sequence, chosen, self._plan.sizes, decoder)
            return {cell: made[schemes[cell].text] for cell in some}

        answers = all_or_each(compute, able)
        answers.skipped |= skipped
        return answers


class ScoredSteps(Question):
    """What is true of the steps that candidate sets are tried on, whatever the set."""

    name = "scored"
    tables = ("scored_steps",)
    cells = ["scored steps"]  # noqa: RUF012
    why_not = "no step was decoded there"

    def __init__(self, replay: VocabReplay, plan: Plan) -> None:
        self._replay, self._schemes = replay, plan.schemes

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return the one cell."""
        # Where nothing is tried nobody asks for them.
        reasons = [self._replay.why_not(one, sequence) for one in self._schemes]
        if why := next(iter(reasons), None) if all(reasons) else None:
            return Answers(skipped=dict.fromkeys(cells, why))
        decoder = self._replay.decoder

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            return {cell: {"scored_steps": self._replay.facts(sequence, decoder)} for cell in some}

        return all_or_each(compute, cells)


class Attention(Question):
    """What the attention of each layer looks like."""

    name = "attention"
    tables = ("attention",)
    cells = ["attention"]  # noqa: RUF012

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def why_not(self) -> str:
        """No layer, or no row."""
        return why_no_layer(self._trace) or "no row follows its prompt"

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return the one cell."""

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            rows = attention_rows(self._trace, sequence)
            return {cell: {"attention": rows} for cell in some if rows.num_rows}

        return all_or_each(compute, cells)


class Attended(Question):
    """How the attention of each query head foretells the next token."""

    name = "attended"
    tables = ("attended", "anchor_drift")
    cells = ["attended tokens"]  # noqa: RUF012

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def why_not(self) -> str:
        """No queries and keys, no layer, or no row."""
        if not layout.holds(self._trace.capture, "qkv"):
            return (
                f"the trace has no queries and keys (--capture {self._trace.capture}), record it "
                "with --capture qkv"
            )
        return why_no_layer(self._trace) or "no token follows a row after its prompt"

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return the one cell."""

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            tables = attended_tables(self._trace, sequence)
            return {cell: tables for cell in some if tables[self.name].num_rows}

        return all_or_each(compute, cells)


class Layers(Question):
    """What rules in one layer, or one KV head, do to the next-token distributions."""

    name = "layers"
    tables = ("layers",)
    why_not = "the sequence has no such point, or nothing to score after it"

    def __init__(self, trace: Trace, plan: Plan, sweep: Sweep, model: RecordedModel) -> None:
        self._trace, self._plan, self._sweep, self._model = trace, plan, sweep, model

    @property
    def cells(self) -> list[str]:
        """All rules together: they are run side by side, and rounding depends on it."""
        heads = "heads" if self._sweep.heads else "layers"
        return [f"{heads}: {', '.join(rule.text for rule in self._sweep.rules)}"]

    def content(self, cell: str) -> str:
        """Return the hashes of the files of budgets."""
        del cell
        return "".join(rule.content for rule in self._sweep.rules)

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return the one cell."""
        loaded = self._model.loaded

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            rows = sweep_sequence(
                self._trace,
                loaded,
                sequence,
                self._sweep.rules,
                heads=self._sweep.heads,
                seed=seed_of(sequence, self._plan.seed),
            )
            return {cell: {"layers": rows} for cell in some if rows.num_rows}

        return all_or_each(compute, cells)


def questions(trace: Trace, plan: Plan, progress: Progress) -> list[Question]:
    """Return what a plan asks of each sequence, in order.

    Parameters
    ----------
    trace
        The trace.
    plan
        What to compute.
    progress
        Told what takes long.
    """
    model = RecordedModel(trace, plan.inside, progress)
    levels: dict[str, Callable[[], Question]] = {
        "local": lambda: Local(trace, plan, progress),
        "predicted": lambda: Predicted(trace, plan, progress),
        "propagated": lambda: Propagated(trace, plan, progress, model),
    }
    asked = [levels[level]() for level in plan.levels] if plan.families else []
    if plan.sweep is not None:
        asked.append(Layers(trace, plan, plan.sweep, model))
    if plan.schemes:
        replay = VocabReplay(trace, Weights(trace, model, progress))
        asked += [Vocabulary(trace, replay, plan), ScoredSteps(replay, plan)]
    if plan.attention:
        asked += [Attention(trace), Attended(trace)]
    return asked
