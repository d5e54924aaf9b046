"""Run a plan over a trace: sequence by sequence, only cells that are not there, then collect."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from tracekit import schema
from tracekit.progress import Progress, Silent
from tracekit.simulate.logit_stats import logit_stats
from tracekit.simulate.manifest import make_manifest
from tracekit.simulate.plan import Plan, make_plan
from tracekit.simulate.pool import run_sequences
from tracekit.simulate.recommend import recommend
from tracekit.simulate.refusals import refuse_impossible
from tracekit.simulate.results import Results
from tracekit.simulate.shown import choose_sequences, shown_tokens
from tracekit.simulate.stacking import stacking
from tracekit.simulate.summary import summarise
from tracekit.trace.reader import Trace
from tracekit.trace.validate import require_whole
from tracekit.trace.writer import disk_errors

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.simulate.work import Done
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
    jobs: int = 1,
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
    jobs
        Processes that share the sequences.
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
    plan, progress, out = plan or make_plan(), progress or Silent(), Path(out)
    refuse_impossible(trace, plan)
    require_whole(trace)
    with disk_errors(out):
        results = Results(out, make_manifest(trace, plan))
        names = [str(name) for name in trace.sequences["sequence_id"]]
        progress.start("simulating", len(names), "sequences")
        done = []
        for one in run_sequences(trace, out, plan, names, jobs, progress):
            done.append(one)
            progress.advance()
        skipped = [row for one in done for row in one.skipped]
        failed = [row for one in done for row in one.failed]
        _tell(progress, skipped, failed)
        _collect(trace, results, plan, done)
        results.write_run(skipped=skipped, failed=failed)
    computed = sum(one.num_computed for one in done)
    found = sum(one.num_found for one in done)
    return Simulated(out, computed, found, tuple(skipped), tuple(failed))


def _tell(progress: Progress, skipped: list[dict[str, str]], failed: list[dict[str, str]]) -> None:
    """Say what failed, and which policies do not apply to how many sequences, and why."""
    for failure in failed:
        progress.say(f"cell {failure['cell']} failed: {failure['why']}")
    counts = Counter((one["what"], one["why"]) for one in skipped)
    for (what, why), count in counts.items():
        progress.say(f"{what} does not apply to {count} sequences: {why}")


def _collect(trace: Trace, results: Results, plan: Plan, done: list[Done]) -> None:
    """Write the tables of all cells of the plan, the summary, and the shown tokens."""
    start = time.perf_counter()
    tables = {
        "kv": schema.KV_RESULTS,
        "logits": schema.LOGITS,
        "vocab": schema.VOCAB_RESULTS,
        "attention": schema.ATTENTION_RESULTS,
    }
    rows = {}
    for name, table in tables.items():
        keys = [key for one in done for key in one.keys.get(name, [])]
        rows[name] = results.cells.read(keys, table)
    rows["kv"] = _with_transfers(rows["kv"], plan.bandwidths)
    for name, table in tables.items():
        results.write_table(table, rows[name])
    kv = _plain(_whole(rows["kv"]))
    summary = summarise(kv, _plain(rows["vocab"]), seed=plan.seed)
    recommended = recommend(_plain(rows["attention"]), seed=plan.seed)
    stacked = stacking(kv, seed=plan.seed)
    convention = plan.inside.convention
    stats = logit_stats(_plain(rows["logits"]), kv, convention=convention, seed=plan.seed)
    for table, columns in (
        (schema.LOGIT_STATS, stats),
        (schema.STACKING, stacked),
        (schema.SUMMARY, summary),
        (schema.RECOMMENDED, recommended),
    ):
        num_rows = len(next(iter(columns.values()), ()))
        results.write_table(table, table.build(num_rows, columns))
    texts = trace.vocabulary()["text"].to_numpy(dtype=object)
    parts = [shown_tokens(trace, name, texts) for name in choose_sequences(trace)]
    shown = pa.concat_tables(parts) if parts else schema.SHOWN.schema.empty_table()
    results.write_table(schema.SHOWN, shown)
    timings = [row for one in done for row in one.timings]
    timings.append(
        {
            "what": "collecting",
            "sequence_id": None,
            "num_cells": 0,
            "wall_s": time.perf_counter() - start,
        }
    )
    columns = {name: [row[name] for row in timings] for name in timings[0]}
    results.write_table(schema.TIMINGS, schema.TIMINGS.build(len(timings), columns))


def _with_transfers(rows: pa.Table, bandwidths: tuple[float, float] | None) -> pa.Table:
    """Return KV results with the time of a step's transfers, one after the other."""
    if bandwidths is None:
        return rows
    fast, slow = bandwidths
    time_s = pc.add(pc.divide(rows["read_bytes"], fast), pc.divide(rows["fetched_bytes"], slow))
    place = rows.schema.get_field_index("transfer_s")
    return rows.set_column(place, rows.schema.field(place), time_s)


def _whole(rows: pa.Table) -> pa.Table:
    """Return the KV results of all layers and all steps together, which summaries are made of."""
    of_all = pc.and_(pc.equal(rows["layer"], schema.ALL), pc.equal(rows["kv_head"], schema.ALL))
    is_any = pc.equal(rows["steps"].cast(pa.string()), schema.ANY)
    return rows.filter(pc.and_(of_all, is_any))


def _plain(rows: pa.Table) -> pd.DataFrame:
    """Return a frame with texts as objects rather than categories."""
    frame: pd.DataFrame = rows.to_pandas()
    texts = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(texts, object))
