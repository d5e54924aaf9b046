"""From finished cells to the tables of a results folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from tracekit import schema
from tracekit.simulate.attended import summarise_attended
from tracekit.simulate.calibration import calibration
from tracekit.simulate.candidate_answers import candidate_answers
from tracekit.simulate.logit_stats import logit_stats
from tracekit.simulate.recommend import recommend
from tracekit.simulate.sensitivity import summarise_layers
from tracekit.simulate.shown import choose_sequences, shown_tokens, token_texts
from tracekit.simulate.stacking import stacking
from tracekit.simulate.summary import summarise
from tracekit.simulate.timed_head import write_head_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from tracekit.simulate.calibration import PowerLaw
    from tracekit.simulate.plan import Plan
    from tracekit.simulate.results import Results
    from tracekit.simulate.work import Done
    from tracekit.trace.reader import Trace

OF_CELLS = (
    schema.KV_RESULTS,
    schema.LOGITS,
    schema.LAYER_RESULTS,
    schema.VOCAB_RESULTS,
    schema.SCORED,
    schema.CANDIDATES,
    schema.ATTENTION_RESULTS,
    schema.ATTENDED,
    schema.ANCHOR_DRIFT,
)
"""Tables of which cells have rows."""


def collect(trace: Trace, results: Results, plan: Plan, done: Sequence[Done]) -> None:
    """Write the tables of all cells of a plan, what is made of them, and the shown tokens.

    Parameters
    ----------
    trace
        The trace.
    results
        The folder with the cells.
    plan
        What was computed.
    done
        What each sequence gave, in order.
    """
    start = time.perf_counter()
    rows, seed = _rows(results, plan, done), plan.seed
    calibrated = calibration(_plain(_whole(rows["kv"])), seed=seed)
    rows["kv"] = _with_corrected(rows["kv"], calibrated.law)
    for table in OF_CELLS:
        results.write_table(table, rows[table.name])
    kv, convention = _plain(_whole(rows["kv"])), plan.inside.convention
    sets = results.cells.read(_keys(done, schema.CANDIDATE_SETS), schema.CANDIDATE_SETS)
    made: dict[schema.Table, Mapping[str, Sequence[Any]]] = {
        **candidate_answers(trace, rows, sets, seed=seed),
        schema.SUMMARY: summarise(kv, _plain(rows["vocab"]), seed=seed),
        schema.ATTENDED_SUMMARY: summarise_attended(
            _plain(rows["attended"]), _plain(rows["anchor_drift"]), seed=seed
        ),
        schema.RECOMMENDED: recommend(_plain(rows["attention"]), seed=seed),
        schema.STACKING: stacking(kv, seed=seed),
        schema.CALIBRATION: calibrated.columns,
        schema.LOGIT_STATS: logit_stats(
            _plain(rows["logits"]), kv, convention=convention, seed=seed
        ),
        schema.LAYER_SUMMARY: summarise_layers(_plain(rows["layers"]), seed=seed),
        schema.TIMINGS: _timings(done, time.perf_counter() - start),
    }
    for table, columns in made.items():
        num_rows = len(next(iter(columns.values()), ()))
        results.write_table(table, table.build(num_rows, columns))
    _write_shown(trace, results, done)
    write_head_times(
        trace,
        results,
        plan,
        was_tried=rows["vocab"].num_rows > 0,
        is_new=any(one.num_computed for one in done),
    )


def _write_shown(trace: Trace, results: Results, done: Sequence[Done]) -> None:
    """Write the tokens of the sequences that a report shows, and what policies left of each."""
    texts, names = token_texts(trace.vocabulary()), choose_sequences(trace)
    parts = [shown_tokens(trace, name, texts) for name in names]
    shown = pa.concat_tables(parts) if parts else schema.SHOWN.schema.empty_table()
    results.write_table(schema.SHOWN, shown)
    theirs = [one for one, name in zip(done, trace.sequence_ids, strict=True) if name in names]
    results.write_table(schema.HELD, results.cells.read(_keys(theirs, schema.HELD), schema.HELD))


def _rows(results: Results, plan: Plan, done: Sequence[Done]) -> dict[str, pa.Table]:
    """Return the rows of all cells, by table."""
    rows = {}
    for table in OF_CELLS:
        rows[table.name] = results.cells.read(_keys(done, table), table)
    rows["kv"] = _with_transfers(rows["kv"], plan.bandwidths)
    return rows


def _keys(done: Sequence[Done], table: schema.Table) -> list[str]:
    """Return the keys of the cells of a plan that have rows of a table."""
    return [key for one in done for key in one.keys.get(table.name, [])]


def _timings(done: Sequence[Done], collecting_s: float) -> dict[str, list[Any]]:
    timings = [row for one in done for row in one.timings]
    last = {"what": "collecting", "sequence_id": None, "num_cells": 0, "wall_s": collecting_s}
    return {name: [row[name] for row in [*timings, last]] for name in last}


def _with_transfers(rows: pa.Table, bandwidths: tuple[float, float] | None) -> pa.Table:
    """Return KV results with the time of a step's transfers, one after the other."""
    if bandwidths is None:
        return rows
    fast, slow = bandwidths
    time_s = pc.add(pc.divide(rows["read_bytes"], fast), pc.divide(rows["fetched_bytes"], slow))
    place = rows.schema.get_field_index("transfer_s")
    return rows.set_column(place, rows.schema.field(place), time_s)


def _with_corrected(rows: pa.Table, law: PowerLaw | None) -> pa.Table:
    """Return KV results with the predictions of the whole after the law of the calibration."""
    if law is None:
        return rows
    is_told = pc.and_(_is_whole(rows), pc.equal(rows["level"].cast(pa.string()), "predicted"))
    told = pc.if_else(is_told, rows["kl_predicted_nats"], None).to_numpy()
    place = rows.schema.get_field_index("kl_corrected_nats")
    kind = rows.schema.field(place)
    corrected = pa.array(law.corrected(told), kind.type, from_pandas=True)
    return rows.set_column(place, kind, corrected)


def _whole(rows: pa.Table) -> pa.Table:
    """Return the KV results of all layers and all steps together, which summaries are made of."""
    return rows.filter(_is_whole(rows))


def _is_whole(rows: pa.Table) -> pa.ChunkedArray:
    of_all = pc.and_(pc.equal(rows["layer"], schema.ALL), pc.equal(rows["kv_head"], schema.ALL))
    return pc.and_(of_all, pc.equal(rows["steps"].cast(pa.string()), schema.ANY))


def _plain(rows: pa.Table) -> pd.DataFrame:
    """Return a frame with texts as objects rather than categories."""
    frame: pd.DataFrame = rows.to_pandas()
    texts = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(texts, object))
