"""The cells of one sequence: those that are not there are computed, here or in another process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tracekit.simulate.calibration_cells import choose_calibrated
from tracekit.simulate.plan import LEVELS
from tracekit.simulate.questions import questions

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.progress import Progress
    from tracekit.simulate.plan import Plan
    from tracekit.simulate.question import Question
    from tracekit.simulate.results import Cells
    from tracekit.trace.reader import Trace


@dataclass(kw_only=True)
class Done:
    """What one sequence gave.

    Parameters
    ----------
    keys
        Keys of the finished cells, by the table of which they have rows.
    num_computed, num_found
        Cells that were not there before, and that were.
    timings
        Rows of ``schema.TIMINGS``.
    skipped, failed
        What does not apply and what went wrong, and why.
    """

    keys: dict[str, list[str]] = field(default_factory=dict)
    num_computed: int = 0
    num_found: int = 0
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
        Told where the head comes from if the trace does not hold it, and what else takes long.
    """

    def __init__(self, trace: Trace, cells: Cells, plan: Plan, progress: Progress) -> None:
        self._cells, self._plan, self._run_id = cells, plan, trace.manifest["run_id"]
        self._questions = questions(trace, replace(plan, levels=plan.all_levels), progress)
        self._calibrated = choose_calibrated(trace.sequences, plan.calibrate or 0, plan.seed)
        self._rows = {str(row["sequence_id"]): row for _, row in trace.sequences.iterrows()}

    def sequence(self, sequence_id: str) -> Done:
        """Compute the cells of one sequence that are not there."""
        done, row = Done(), self._rows[sequence_id]
        extra = set() if sequence_id in self._calibrated else set(LEVELS) - set(self._plan.levels)
        for question in self._questions:
            if question.name not in extra:
                self._ask(question, row, done)
        return done

    def _ask(self, question: Question, row: pd.Series[Any], done: Done) -> None:
        """Answer one question: compute missing cells, note skips and failures."""
        sequence_id = str(row["sequence_id"])
        keys = {
            cell: self._plan.key(
                self._run_id, question.name, sequence_id, cell + question.content(cell)
            )
            for cell in question.cells
        }
        num_tables = len(question.tables)
        missing = [cell for cell in keys if not self._cells.has(keys[cell], num_tables)]
        done.num_found += len(keys) - len(missing)
        if missing:
            start = time.perf_counter()
            answers = question.answer(row, missing)
            for cell, tables in answers.made.items():
                self._cells.write(keys[cell], [tables[name] for name in question.tables])
            done.num_computed += len(answers.made)
            if answers.made:
                wall_s = time.perf_counter() - start
                done.timings.append(_timing(question.name, sequence_id, len(answers.made), wall_s))
            why = dict.fromkeys(missing, question.why_not) | answers.skipped
            done.failed += [
                {"cell": f"{_short(cell)} on {sequence_id}", "why": wrong}
                for cell, wrong in answers.failed.items()
            ]
            done.skipped += [
                {"what": _short(cell), "sequence_id": sequence_id, "why": why[cell]}
                for cell in missing
                if cell not in answers.made and cell not in answers.failed
            ]
        there = [key for key in keys.values() if self._cells.has(key, num_tables)]
        for place, table in enumerate(question.tables):
            done.keys.setdefault(table, []).extend(self._cells.part(key, place) for key in there)


def _timing(what: str, sequence_id: str, num_cells: int, wall_s: float) -> dict[str, Any]:
    return {"what": what, "sequence_id": sequence_id, "num_cells": num_cells, "wall_s": wall_s}


def _short(cell: str) -> str:
    """Return a cell's name without its amounts."""
    return cell.split(": ")[0]
