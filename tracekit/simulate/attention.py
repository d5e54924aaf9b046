"""Attention statistics of a recorded sequence, by layer and KV head."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.errors import TraceError, UsageError
from tracekit.measure.tensors import to_torch
from tracekit.measure.top_keys import jaccard
from tracekit.simulate.attention_layer import LayerRows, ScoredSpan, by_head, measure, rows_of
from tracekit.simulate.lengths import length_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    import pyarrow as pa

    from tracekit.spec import LayerSpec
    from tracekit.trace.reader import Trace


ROW_QUANTILE = 0.9
"""Share of the rows, and of the sequences, whose attention a recommended fraction keeps."""


def attention_rows(
    trace: Trace, sequence: pd.Series[Any], *, row_quantile: float = ROW_QUANTILE
) -> pa.Table:
    """Return the rows of ``schema.ATTENTION_RESULTS`` on one sequence.

    Parameters
    ----------
    trace
        Recorded with queries and keys; from a trace without them come the few numbers that its
        table of attention rows holds, all others are null.
    sequence
        Its row of ``trace.sequences``.
    row_quantile
        Share of the rows whose mass the needed keys keep, in (0, 1].

    Returns
    -------
    Table
        A row for each KV head and each layer that holds keys of its own; none where no row counts.

    Raises
    ------
    TraceError
        If the trace holds no attention at all.
    UsageError
        If the quantile is out of range.
    """
    if not 0 < row_quantile <= 1:
        msg = f"row quantile {row_quantile:g} is out of range: give one above 0 and up to 1."
        raise UsageError(msg)
    if trace.capture == "steps":
        msg = (
            f"attention statistics need attention: {trace.path} was recorded with --capture steps, "
            "record it with --capture hidden or qkv."
        )
        raise TraceError(msg)
    name, span = str(sequence["sequence_id"]), ScoredSpan.of(sequence)
    stored = set(trace.stored_layers(name))
    layers = [one for one in trace.spec.layers if one.holds_keys and not one.refusal]
    whole = [one for one in layers if one.index in stored]
    parts = _measured(trace, name, whole, span, row_quantile)
    if rest := [one for one in layers if one.index not in stored]:
        parts += _recorded(trace, name, rest, span)
    rows = [row for part in parts for row in part]
    shared = {
        "sequence_id": name,
        "domain": sequence["domain"],
        "bucket": length_bucket(int(sequence["num_tokens"])),
        "level": "local",
        "first_row": span.first_row,
    }
    columns = {key: [row.get(key) for row in rows] for key in (rows[0] if rows else ())}
    return schema.ATTENTION_RESULTS.build(len(rows), columns | shared)


def _measured(
    trace: Trace, name: str, layers: list[LayerSpec], span: ScoredSpan, row_quantile: float
) -> list[list[dict[str, Any]]]:
    """Return, by layer, the rows that queries and keys give, read one layer at a time."""
    measured: list[LayerRows] = []
    for layer in layers:
        blocks = trace.attention_inputs(name, layer.index)
        query, key = (to_torch(blocks[kind].data, blocks[kind].dtype) for kind in ("query", "key"))
        if span.first_row < key.shape[-2]:
            measured.append(measure(query, key, layer, span, row_quantile))
    _compare_with_next(measured)
    return [one.rows for one in measured]


def _compare_with_next(measured: list[LayerRows]) -> None:
    """Fill in the overlap of each layer's top keys with those of the layer above it."""
    for one, above in pairwise(measured):
        # A layer whose window holds no more keys than are compared has no rows at all.
        if above.index == one.index + 1 and len(one.top_Rk) and len(above.top_Rk):
            overlap = jaccard(one.top_Rk, above.top_Rk)
            one.rows[-1]["next_layer_jaccard"] = float(overlap.mean())


def _recorded(
    trace: Trace, name: str, layers: list[LayerSpec], span: ScoredSpan
) -> Iterator[list[dict[str, Any]]]:
    """Yield, by layer, the rows that recorded statistics give: the shape alone."""
    columns_read = ("layer", "head", "query", "entropy_nats", "effective_keys", "sink_mass")
    frame = trace.table("attention", sequence_id=name, columns=columns_read)
    frame = frame[frame["query"] >= span.first_row]
    for layer in layers:
        part = frame[frame["layer"] == layer.index].sort_values(["head", "query"])
        if part.empty:
            continue
        values_HR: dict[str, np.ndarray] = {
            name: part[name].to_numpy(np.float64).reshape(layer.num_heads, -1)
            for name in ("entropy_nats", "effective_keys", "sink_mass", "query")
        }
        sink_HR = values_HR.pop("sink_mass")
        query_HR, entropy_HR = values_HR.pop("query"), values_HR["entropy_nats"]
        seen_HR = np.minimum(query_HR + 1, layer.window or np.inf)
        with np.errstate(invalid="ignore"):
            values_HR |= {"seen_keys": seen_HR, "entropy_frac": entropy_HR / np.log(seen_HR)}
        values_HR["entropy_variance"] = entropy_HR.var(1, keepdims=True)
        # Recorded masses are shares of a softmax in which sink logits have a part.
        if layer.sinks is None:
            values_HR["first_4_mass"] = sink_HR
        columns = {name: by_head(values, layer) for name, values in values_HR.items()}
        yield rows_of(layer, entropy_HR.shape[1], columns)
