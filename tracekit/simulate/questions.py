"""The questions that a plan asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit.simulate.attention import attention_rows
from tracekit.simulate.layers import sweep_sequence
from tracekit.simulate.levels import Local, Predicted, Propagated
from tracekit.simulate.question import Answers, Question, Tables, all_or_each, seed_of
from tracekit.simulate.recorded_model import RecordedModel
from tracekit.simulate.stacks import why_no_layer
from tracekit.simulate.vocab import VocabReplay

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
    tables = ("vocab",)
    why_not = "no step was decoded there, or the trace has no other prompt to fit it on"

    def __init__(self, trace: Trace, plan: Plan, progress: Progress) -> None:
        self._trace, self._plan, self._progress = trace, plan, progress
        sizes = ",".join(map(str, plan.sizes))
        self._estimators = {f"{one.text}: {sizes}": one for one in plan.estimators}
        self._replay: VocabReplay | None = None

    @property
    def cells(self) -> list[str]:
        """Estimators."""
        return list(self._estimators)

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return estimators, computed together: they share the logits."""

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            if self._replay is None:
                self._replay = VocabReplay(self._trace, self._progress)
            by_text = {self._estimators[cell].text: cell for cell in some}
            chosen = [self._estimators[cell] for cell in some]
            rows = self._replay.sequence(sequence, chosen, self._plan.sizes)
            return {by_text[text]: {"vocab": table} for text, table in rows.items()}

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
    if plan.estimators:
        asked.append(Vocabulary(trace, plan, progress))
    if plan.attention:
        asked.append(Attention(trace))
    return asked
