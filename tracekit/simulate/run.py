"""Run a plan over a trace: sequence by sequence, only cells that are not there, then collect."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from tracekit import schema
from tracekit.errors import TraceError, TracekitError
from tracekit.kv.schedule import Spans
from tracekit.progress import Progress, Silent
from tracekit.simulate.kv import replay_sequence
from tracekit.simulate.manifest import make_manifest
from tracekit.simulate.plan import Plan, make_plan
from tracekit.simulate.results import Results
from tracekit.simulate.shown import choose_sequences, shown_tokens
from tracekit.simulate.summary import summarise
from tracekit.simulate.vocab import VocabReplay
from tracekit.trace.reader import Trace
from tracekit.trace.validate import require_whole
from tracekit.trace.writer import disk_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracekit.trace.folder import AnyPath


@dataclass(frozen=True)
class Simulated:
    """What a simulation left: its folder, cells computed and found, skips and failures."""

    path: Path
    num_computed: int
    num_found: int
    skipped: tuple[dict[str, str], ...]
    failed: tuple[dict[str, str], ...]


def simulate(
    trace: str | AnyPath | Trace,
    out: str | Path,
    plan: Plan | None = None,
    *,
    progress: Progress | None = None,
) -> Simulated:
    """Replay a trace under a plan; finished cells are found and not computed again.

    Parameters
    ----------
    trace
        A trace, or its folder or URL.
    out
        Folder of the results: new, empty, or results of the same trace.
    plan
        What to compute (``make_plan``); None: the default set of all questions.
    progress
        Listener.

    Returns
    -------
    Simulated
        Cells that failed are listed; the others are in the folder all the same.

    Raises
    ------
    TraceError
        If the trace lacks what the plan needs.
    InputError
        If the folder belongs to something else.
    """
    trace = trace if isinstance(trace, Trace) else Trace(trace)
    plan, progress = plan or make_plan(), progress or Silent()
    _check_capture(trace, plan)
    require_whole(trace)
    with disk_errors(Path(out)):
        run = _Run(trace, Results(Path(out), make_manifest(trace, plan)), plan, progress)
        sequences = trace.sequences
        progress.start("simulating", len(sequences), "sequences")
        for _, sequence in sequences.iterrows():
            run.sequence(sequence)
            progress.advance()
        run.tell()
        return run.collect()


class _Run:
    """One simulation: the open trace, the results folder, the plan, and what happened so far."""

    def __init__(self, trace: Trace, results: Results, plan: Plan, progress: Progress) -> None:
        self._trace = trace
        self._results = results
        self._plan = plan
        self._progress = progress
        self._families = {
            f"{family[0].family}: {', '.join(policy.text for policy in family)}": family
            for family in plan.families
        }
        sizes = ",".join(map(str, plan.sizes))
        self._estimators = {f"{one.text}: {sizes}": one for one in plan.estimators}
        self._vocab: VocabReplay | None = None
        self._keys: dict[str, list[str]] = {"kv": [], "vocab": []}
        self._timings: list[dict[str, Any]] = []
        self._computed = 0
        self.skipped: list[dict[str, str]] = []
        self.failed: list[dict[str, str]] = []

    def sequence(self, sequence: pd.Series[Any]) -> None:
        """Compute the cells of one sequence that are not there.

        A cell is a policy with all its kept amounts, or an estimator with all its sizes: they are
        computed together, and rounding depends on what is.
        """
        self._question("kv", sequence, list(self._families), self._kv)
        self._question("vocab", sequence, list(self._estimators), self._vocabulary)

    def tell(self) -> None:
        """Say what failed, and which policies do not apply to how many sequences, and why."""
        for failure in self.failed:
            self._progress.say(f"cell {failure['cell']} failed: {failure['why']}")
        for (what, why), count in Counter(
            (one["what"], one["why"]) for one in self.skipped
        ).items():
            self._progress.say(f"{what} does not apply to {count} sequences: {why}")

    def collect(self) -> Simulated:
        """Write the tables of all cells of the plan, the summary, and the shown tokens."""
        start, results = time.perf_counter(), self._results
        tables = {"kv": schema.KV_RESULTS, "vocab": schema.VOCAB_RESULTS}
        rows = {name: results.read_cells(self._keys[name], tables[name]) for name in tables}
        for name, table in tables.items():
            results.write_table(table, rows[name])
        summary = summarise(_plain(rows["kv"]), _plain(rows["vocab"]), seed=self._plan.seed)
        num_rows = len(summary["mean"])
        results.write_table(schema.SUMMARY, schema.SUMMARY.build(num_rows, summary))
        self._write_shown()
        self._time("collecting", None, 0, start)
        columns = {name: [row[name] for row in self._timings] for name in self._timings[0]}
        results.write_table(schema.TIMINGS, schema.TIMINGS.build(len(self._timings), columns))
        results.write_run(skipped=self.skipped, failed=self.failed)
        found = sum(map(len, self._keys.values())) - self._computed
        return Simulated(
            results.path, self._computed, found, tuple(self.skipped), tuple(self.failed)
        )

    def _question(
        self,
        question: str,
        sequence: pd.Series[Any],
        names: list[str],
        compute: Callable[[pd.Series[Any], list[str]], dict[str, pa.Table]],
    ) -> None:
        """Answer one question on one sequence: compute missing cells, note skips and failures."""
        sequence_id = str(sequence["sequence_id"])
        keys = {
            name: self._plan.key(self._trace.manifest["run_id"], question, sequence_id, name)
            for name in names
        }
        missing = [name for name in names if not self._results.has(keys[name])]
        start = time.perf_counter()
        made: Mapping[str, pa.Table] = {}
        if missing:
            try:
                made = compute(sequence, missing)
            except (TracekitError, ArithmeticError, ValueError, RuntimeError) as error:
                cell = f"{question} of {sequence_id}"
                self.failed.append({"cell": cell, "why": f"{type(error).__name__}: {error}"})
                missing = []
        for name, rows in made.items():
            self._results.write_cell(keys[name], rows)
        self._computed += len(made)
        if made:
            self._time(question, sequence_id, len(made), start)
        for name in missing:
            if name not in made:
                self.skipped.append(
                    {"what": name.split(": ")[0], "sequence_id": sequence_id, "why": _WHY[question]}
                )
        self._keys[question] += [keys[name] for name in names if self._results.has(keys[name])]

    def _kv(self, sequence: pd.Series[Any], missing: list[str]) -> dict[str, pa.Table]:
        tables = replay_sequence(
            self._trace,
            sequence,
            [self._families[name] for name in missing],
            spans_of(sequence),
            seed=int(sequence["seed"]) ^ self._plan.seed,
            bytes_per_number=self._plan.bytes_per_number,
        )
        cells = {
            name: [tables[policy.text] for policy in self._families[name] if policy.text in tables]
            for name in missing
        }
        return {name: pa.concat_tables(parts) for name, parts in cells.items() if parts}

    def _vocabulary(self, sequence: pd.Series[Any], missing: list[str]) -> dict[str, pa.Table]:
        if self._vocab is None:
            self._vocab = VocabReplay(self._trace, self._progress)
        estimators = {self._estimators[name].text: name for name in missing}
        tables = self._vocab.sequence(
            sequence, [self._estimators[name] for name in missing], self._plan.sizes
        )
        return {estimators[text]: rows for text, rows in tables.items()}

    def _write_shown(self) -> None:
        texts = self._trace.vocabulary()["text"].to_numpy(dtype=object)
        parts = [shown_tokens(self._trace, name, texts) for name in choose_sequences(self._trace)]
        rows = pa.concat_tables(parts) if parts else schema.SHOWN.schema.empty_table()
        self._results.write_table(schema.SHOWN, rows)

    def _time(self, what: str, sequence_id: str | None, num_cells: int, start: float) -> None:
        self._timings.append(
            {
                "what": what,
                "sequence_id": sequence_id,
                "num_cells": num_cells,
                "wall_s": time.perf_counter() - start,
            }
        )


_WHY = {
    "kv": "the sequence has no such eviction point, or nothing to score after it",
    "vocab": "no step was decoded there, or the trace has no other prompt to fit it on",
}
"""Why a question has no answer on a sequence."""


def spans_of(sequence: pd.Series[Any]) -> Spans:
    """Return where a recorded sequence's context, prompt and turns end."""
    return Spans(
        context_end=_whole(sequence["context_end"]),
        prompt_end=_whole(sequence["prompt_end"]),
        turn_ends=tuple(int(end) for end in sequence["turn_ends"]),
        num_tokens=int(sequence["num_tokens"]),
    )


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def _plain(rows: pa.Table) -> pd.DataFrame:
    """Return a frame with texts as objects rather than categories."""
    frame: pd.DataFrame = rows.to_pandas()
    texts = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(texts, object))


def _check_capture(trace: Trace, plan: Plan) -> None:
    """Raise if the trace lacks what the plan needs, naming the capture that has it."""
    if not trace.shards:
        msg = f"{trace.path} holds no finished sequence yet; run the same record command to go on."
        raise TraceError(msg)
    if plan.families and trace.capture != "qkv":
        msg = (
            f"KV replay needs queries, keys and values: {trace.path} was recorded with --capture "
            f"{trace.capture}, record it with --capture qkv, or name --vocab alone."
        )
        raise TraceError(msg)
    biased = [one for one in trace.spec.layers if one.alibi and one.refusal is None]
    if plan.families and biased:
        msg = f"KV replay does not know the ALiBi biases of {trace.spec.name} yet; name --vocab alone."
        raise TraceError(msg)
    if plan.estimators and trace.capture == "steps":
        msg = (
            f"vocabulary replay needs final hidden states: {trace.path} was recorded with "
            "--capture steps, record it with --capture hidden or qkv."
        )
        raise TraceError(msg)
