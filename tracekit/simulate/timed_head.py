"""The head of a run's model, timed on its machine; apart from results, which are the same each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.progress import Silent
from tracekit.simulate.head_times import head_times
from tracekit.simulate.recorded_model import RecordedModel
from tracekit.simulate.weights import Weights

if TYPE_CHECKING:
    from tracekit.simulate.plan import Plan
    from tracekit.simulate.results import Results
    from tracekit.trace.reader import Trace


def write_head_times(
    trace: Trace, results: Results, plan: Plan, *, was_tried: bool, is_new: bool
) -> None:
    """Write ``schema.HEAD_TIMES``, or remove what another plan left.

    Parameters
    ----------
    trace, results, plan
        Of the run.
    was_tried
        Whether any candidate set was tried.
    is_new
        Whether the run computed a cell: else times that are there for these sizes stand.
    """
    if not was_tried:
        results.write_table(schema.HEAD_TIMES, schema.HEAD_TIMES.schema.empty_table())
        return
    sizes = {min(size, trace.spec.head.num_rows) for size in plan.sizes}
    there = set(results.read_table(schema.HEAD_TIMES)["size"].to_pylist())
    if there == sizes and not is_new:
        return
    # The replay has said where the head comes from.
    model = RecordedModel(trace, plan.inside, Silent())
    columns: dict[str, Any] = head_times(
        trace.spec, Weights(trace, model, Silent()).head, sorted(sizes)
    )
    num_rows = len(columns["size"])
    results.write_table(schema.HEAD_TIMES, schema.HEAD_TIMES.build(num_rows, columns))
