"""The cells of one sequence: those that are not there are computed, here or in another process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tracekit.errors import TracekitError
from tracekit.simulate.attention import attention_rows
from tracekit.simulate.kv import replay_sequence
from tracekit.simulate.stacks import why_no_layer
from tracekit.simulate.vocab import VocabReplay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from tracekit.progress import Progress
    from tracekit.simulate.plan import Plan
    from tracekit.simulate.results import Cells
    from tracekit.trace.reader import Trace

QUESTIONS = ("kv", "vocab", "attention")
"""What is asked of each sequence, in this order."""

_WHY = {
    "kv": "the sequence has no such eviction point, or nothing to score after it",
    "vocab": "no step was decoded there, or the trace has no other prompt to fit it on",
    "attention": "no row follows its prompt",
}
"""Why a question has no answer on a sequence."""

_FAILS = (TracekitError, ArithmeticError, ValueError, RuntimeError, MemoryError, OSError)
"""What may go wrong in a cell without stopping the others."""


@dataclass(kw_only=True)
class Done:
    """What one sequence gave.

    Parameters
    ----------
    keys
        Keys of the finished cells, by question.
    num_computed
        Of these, how many were not there before.
    timings
        Rows of ``schema.TIMINGS``.
    skipped, failed
        What does not apply and what went wrong, and why.
    """

    keys: dict[str, list[str]] = field(default_factory=dict)
    num_computed: int = 0
    timings: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)


class Worker:
    """Computes the cells of one sequence after another.

    A cell is a policy with all its amounts, or an estimator with all its sizes: they are computed
    together, and rounding depends on what is.

    Parameters
    ----------
    trace
        The trace.
    cells
        Where cells are written.
    plan
        What to compute.
    progress
        Told where the head comes from if the trace does not hold it.
    """

    def __init__(self, trace: Trace, cells: Cells, plan: Plan, progress: Progress) -> None:
        self._trace, self._cells, self._plan, self._progress = trace, cells, plan, progress
        self._families = {
            f"{family[0].family}: {', '.join(policy.text for policy in family)}": family
            for family in plan.families
        }
        sizes = ",".join(map(str, plan.sizes))
        self._estimators = {f"{one.text}: {sizes}": one for one in plan.estimators}
        self._vocab: VocabReplay | None = None
        none = why_no_layer(trace)
        self._why = _WHY if none is None else _WHY | {"kv": none, "attention": none}
        self._rows = {str(row["sequence_id"]): row for _, row in trace.sequences.iterrows()}

    def sequence(self, sequence_id: str) -> Done:
        """Compute the cells of one sequence that are not there."""
        done, row = Done(), self._rows[sequence_id]
        names = {
            "kv": list(self._families),
            "vocab": list(self._estimators),
            "attention": ["attention"] if self._plan.attention else [],
        }
        for question in QUESTIONS:
            self._question(question, row, names[question], done)
        return done

    def _question(self, question: str, row: pd.Series[Any], names: list[str], done: Done) -> None:
        """Answer one question: compute missing cells, note skips and failures."""
        sequence_id, run_id = str(row["sequence_id"]), self._trace.manifest["run_id"]
        keys = {
            name: self._plan.key(run_id, question, sequence_id, name + self._content(name))
            for name in names
        }
        missing = [name for name in names if not self._cells.has(keys[name])]
        compute = {"kv": self._kv, "vocab": self._vocabulary, "attention": self._attention}
        start = time.perf_counter()
        made, failed = _all_or_each(lambda some: compute[question](row, some), missing)
        for name, rows in made.items():
            self._cells.write(keys[name], rows)
        done.num_computed += len(made)
        if made:
            done.timings.append(
                {
                    "what": question,
                    "sequence_id": sequence_id,
                    "num_cells": len(made),
                    "wall_s": time.perf_counter() - start,
                }
            )
        done.failed += [
            {"cell": f"{_short(name)} on {sequence_id}", "why": why} for name, why in failed.items()
        ]
        done.skipped += [
            {"what": _short(name), "sequence_id": sequence_id, "why": self._why[question]}
            for name in missing
            if name not in made and name not in failed
        ]
        done.keys[question] = [keys[name] for name in names if self._cells.has(keys[name])]

    def _content(self, name: str) -> str:
        """Return what a policy's numbers depend on beside its text: the content of its file."""
        family = self._families.get(name)
        return family[0].layers.content if family is not None else ""

    def _kv(self, row: pd.Series[Any], names: Sequence[str]) -> dict[str, pa.Table]:
        tables = replay_sequence(
            self._trace,
            row,
            [self._families[name] for name in names],
            seed=int(row["seed"]) ^ self._plan.seed,
            bytes_per_number=self._plan.bytes_per_number,
        )
        cells = {
            name: [tables[policy.text] for policy in self._families[name] if policy.text in tables]
            for name in names
        }
        return {name: pa.concat_tables(parts) for name, parts in cells.items() if parts}

    def _vocabulary(self, row: pd.Series[Any], names: Sequence[str]) -> dict[str, pa.Table]:
        if self._vocab is None:
            self._vocab = VocabReplay(self._trace, self._progress)
        estimators = {self._estimators[name].text: name for name in names}
        tables = self._vocab.sequence(
            row, [self._estimators[name] for name in names], self._plan.sizes
        )
        return {estimators[text]: rows for text, rows in tables.items()}

    def _attention(self, row: pd.Series[Any], names: Sequence[str]) -> dict[str, pa.Table]:
        rows = attention_rows(self._trace, row)
        return {name: rows for name in names if rows.num_rows}


def _all_or_each(
    compute: Callable[[Sequence[str]], Mapping[str, pa.Table]], names: Sequence[str]
) -> tuple[dict[str, pa.Table], dict[str, str]]:
    """Return cells and failures; if they fail together each is tried alone, to lose only its own."""
    if not names:
        return {}, {}
    try:
        return dict(compute(names)), {}
    except _FAILS as error:
        if len(names) == 1:
            return {}, {names[0]: _sentence(error)}
    made: dict[str, pa.Table] = {}
    failed: dict[str, str] = {}
    for name in names:
        one, why = _all_or_each(compute, [name])
        made |= one
        failed |= why
    return made, failed


def _sentence(error: Exception) -> str:
    """Return what went wrong; our own errors are sentences, others need their kind."""
    return str(error) if isinstance(error, TracekitError) else f"{type(error).__name__}: {error}"


def _short(name: str) -> str:
    """Return a cell's name without its amounts."""
    return name.split(": ")[0]
