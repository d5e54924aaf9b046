"""How attention foretells the next token of a recorded sequence, by layer and query head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from tracekit import schema
from tracekit.measure.attended import (
    TOP_TOKENS,
    anchor_overlap,
    anchors,
    attended_tokens,
    without_first_key,
)
from tracekit.measure.attention_shape import attention_blocks
from tracekit.measure.stats import bootstrap_mean
from tracekit.measure.tensors import to_torch
from tracekit.simulate.attention_layer import ScoredSpan
from tracekit.simulate.lengths import length_bucket
from tracekit.trace import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from tracekit.spec import LayerSpec
    from tracekit.trace.reader import Trace

LAGS = (1, 16)
"""Rows between the anchors that are compared."""

CONTEXT_ENDS = 64 << np.arange(26)
"""Most tokens seen of each bucket of context length; a bucket begins after the one before."""

MEASURES = (
    *("copied_frac", "distinct_tokens", "next_mass", "chance_mass"),
    *("rank_median", "reciprocal_rank"),
    *(f"top_{k}_hit" for k in TOP_TOKENS),
    *(f"top_{k}_hit_all" for k in TOP_TOKENS),
    *("repeated_frac", "induction_mass", "induction_chance", "induction_hit"),
)
"""Columns of ``schema.ATTENDED`` that are summarised over sequences."""

DRIFT_MEASURES = (
    *(f"overlap_{lag}" for lag in LAGS),
    *(f"drift_{lag}" for lag in LAGS),
    *("age_tokens", "prompt_frac"),
)
"""Columns of ``schema.ANCHOR_DRIFT`` that are."""

Row = dict[str, Any]


def attended_tables(trace: Trace, sequence: pd.Series[Any]) -> dict[str, pa.Table]:
    """Return the rows of ``schema.ATTENDED`` and ``schema.ANCHOR_DRIFT`` on one sequence.

    Parameters
    ----------
    trace
        The trace; layers whose queries and keys it does not hold, or whose attention could not be
        checked, have no rows. Those that read another layer's keys have.
    sequence
        Its row of ``trace.sequences``.

    Returns
    -------
    dict
        Tables by name: a row for each query head and each layer, a row for each layer and bucket
        of context length. Empty where no scored row is followed by a token.
    """
    name, span = str(sequence["sequence_id"]), ScoredSpan.of(sequence)
    # The last token has none after it.
    num_rows = int(sequence["num_tokens"]) - 1
    attended: list[Row] = []
    drift: list[Row] = []
    if span.first_row < num_rows:
        tokens = trace.table("tokens", sequence_id=name, columns=["position", "token_id"])
        ids_T = torch.tensor(tokens.sort_values("position")["token_id"].to_numpy(np.int64))
        prompt_end = None if pd.isna(sequence["prompt_end"]) else int(sequence["prompt_end"])
        for layer in _layers(trace, name):
            blocks = trace.attention_inputs(name, layer.index)
            query, key = (
                to_torch(blocks[kind].data, blocks[kind].dtype)[:, :num_rows]
                for kind in ("query", "key")
            )
            heads, top_Rk = _measured(query, key, layer, ids_T, span.first_row)
            attended += heads
            drift += _drift(top_Rk, layer, num_rows, span.first_row, prompt_end)
    shared = {
        "sequence_id": name,
        "domain": sequence["domain"],
        "bucket": length_bucket(int(sequence["num_tokens"])),
        "level": "local",
    }
    return {
        table.name: table.build(
            len(rows), {name: [row[name] for row in rows] for name in (rows or [{}])[0]} | shared
        )
        for table, rows in ((schema.ATTENDED, attended), (schema.ANCHOR_DRIFT, drift))
    }


def _layers(trace: Trace, sequence_id: str) -> list[LayerSpec]:
    """Return the layers whose attention can be computed again."""
    if not layout.holds(trace.capture, "qkv"):
        return []
    stored = set(trace.stored_layers(sequence_id))
    return [
        one
        for one in trace.spec.layers
        if not one.refusal and one.index in stored and (one.owner is None or one.owner in stored)
    ]


def _measured(
    query: torch.Tensor,
    key: torch.Tensor,
    layer: LayerSpec,
    ids_T: torch.Tensor,
    first_row: int,
) -> tuple[list[Row], torch.Tensor]:
    """Return the rows of each query head and of the layer, and the anchors of its last rows.

    Anchors begin as many rows before the first scored one as they are compared over.
    """
    columns: list[dict[str, torch.Tensor]] = []
    tops: list[torch.Tensor] = []
    for block in attention_blocks(query, key, layer, max(0, first_row - max(LAGS))):
        rows = without_first_key(block)
        tops.append(anchors(rows, schema.ANCHOR_KEYS))
        columns.append(attended_tokens(rows.since(first_row), ids_T))
    values_HR = {name: torch.cat([one[name] for one in columns], 1).numpy() for name in columns[0]}
    rank_HR = values_HR.pop("rank")
    means_H = {name: _over_rows(values, np.mean) for name, values in values_HR.items()}
    means_H["rank_median"] = _over_rows(rank_HR, np.median)
    heads = [*range(layer.num_heads), schema.ALL]
    values = {name: [*of_heads, _known(of_heads, np.mean)] for name, of_heads in means_H.items()}
    place = {"layer": layer.index, "first_row": first_row, "num_scored": rank_HR.shape[1]}
    found = [
        place | {"head": head} | {name: own[at] for name, own in values.items()}
        for at, head in enumerate(heads)
    ]
    return found, torch.cat(tops)


def _over_rows(values_HR: np.ndarray, statistic: Callable[[np.ndarray], Any]) -> np.ndarray:
    """Return a statistic of each head's rows, float64 [H]; NaN where none has a value."""
    return np.array([_known(row, statistic) for row in values_HR])


def _known(values: np.ndarray, statistic: Callable[[np.ndarray], Any]) -> float:
    """Return a statistic of what is not NaN; NaN if nothing is."""
    known = values[~np.isnan(values)]
    return float(statistic(known)) if len(known) else np.nan


def _drift(
    anchors_Rk: torch.Tensor,
    layer: LayerSpec,
    num_rows: int,
    first_row: int,
    prompt_end: int | None,
) -> Iterator[Row]:
    """Yield how the anchors of a layer move, by bucket of context length."""
    cut = first_row - num_rows
    overlaps = {lag: anchor_overlap(anchors_Rk, lag)[cut:].numpy() for lag in LAGS}
    top_Rk, row_R = anchors_Rk[cut:].numpy(), np.arange(first_row, num_rows)
    has_R = top_Rk[:, 0] >= 0
    bucket_R = np.searchsorted(CONTEXT_ENDS, row_R + 1)
    for bucket in np.unique(bucket_R[has_R]):
        inside_R = has_R & (bucket_R == bucket)
        inside_Rk = top_Rk[inside_R]
        overlap = {lag: _known(one[inside_R], np.mean) for lag, one in overlaps.items()}
        yield (
            {
                "layer": layer.index,
                "context_first": 1 + int(CONTEXT_ENDS[bucket - 1]) if bucket else 1,
                "context_last": int(CONTEXT_ENDS[bucket]),
                "num_scored": len(inside_Rk),
                "age_tokens": float((row_R[inside_R, None] - inside_Rk).mean()),
                "prompt_frac": None
                if prompt_end is None
                else float((inside_Rk < prompt_end).mean()),
            }
            | {f"overlap_{lag}": one for lag, one in overlap.items()}
            | {f"drift_{lag}": 1 - one for lag, one in overlap.items()}
        )


def summarise_attended(attended: pd.DataFrame, drift: pd.DataFrame, *, seed: int) -> Row:
    """Return the columns of ``schema.ATTENDED_SUMMARY``.

    Parameters
    ----------
    attended, drift
        Rows of ``schema.ATTENDED`` and ``schema.ANCHOR_DRIFT``, any number of sequences.
    seed
        Of the bootstrap; sequences are resampled, not rows.

    Returns
    -------
    dict
        All layers together, also by domain; each layer, its mean head (-1) first; then the drift by
        bucket of context length, of all layers together and of each.
    """
    heads = attended.astype(dict.fromkeys(MEASURES, np.float64))
    moves = drift.astype(dict.fromkeys(DRIFT_MEASURES, np.float64))
    whole = _over_layers(heads[heads["head"] == schema.ALL], MEASURES, "head")
    context = ["context_first", "context_last"]
    every = _over_layers(moves, DRIFT_MEASURES, *context).assign(head=schema.ALL)
    found = [
        *_summaries(whole, MEASURES, ["layer", "head"], seed),
        *_summaries(whole, MEASURES, ["layer", "head", "domain"], seed),
        *_summaries(heads, MEASURES, ["layer", "head"], seed),
        *_summaries(every, DRIFT_MEASURES, ["layer", "head", *context], seed),
        *_summaries(
            moves.assign(head=schema.ALL), DRIFT_MEASURES, ["layer", "head", *context], seed
        ),
    ]
    names = [column.name for column in schema.ATTENDED_SUMMARY.columns]
    return {name: [row.get(name) for row in found] for name in names}


def _over_layers(rows: pd.DataFrame, measures: Sequence[str], *by: str) -> pd.DataFrame:
    """Return the mean over layers within each sequence, as layer -1."""
    grouped = rows.groupby(["sequence_id", "domain", *by], observed=True, sort=True)
    return grouped[list(measures)].mean().reset_index().assign(layer=schema.ALL)


def _summaries(
    rows: pd.DataFrame, measures: Sequence[str], by: list[str], seed: int
) -> Iterator[Row]:
    """Yield the measures of each place over sequences."""
    for names, place in rows.groupby(by, observed=True, sort=True):
        shared = {"domain": schema.ANY, "level": "local"} | dict(zip(by, names, strict=True))
        for measure in measures:
            one = bootstrap_mean(place[measure].to_numpy(), seed=seed)
            yield shared | {
                "measure": measure,
                "mean": one.mean,
                "low": one.low,
                "high": one.high,
                "n": one.n,
            }
