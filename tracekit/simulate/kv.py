"""KV eviction on one recorded sequence at level local: replays layer stacks, tallies the measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit import schema
from tracekit.kv.replay import Reference, replay
from tracekit.measure.tensors import to_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd
    import pyarrow as pa

    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Replay
    from tracekit.kv.schedule import Spans
    from tracekit.spec import LayerSpec
    from tracekit.trace.reader import Trace

STACK_BYTES = 256 << 20
"""Queries, keys and values of the layers that are replayed together."""


@dataclass
class _Tally:
    """What one policy did on one sequence, layer by layer; all lists are per layer."""

    layers: list[LayerSpec] = field(default_factory=list)
    held_GR: list[np.ndarray] = field(default_factory=list)
    full_R: list[np.ndarray] = field(default_factory=list)
    error_sq_G: list[np.ndarray] = field(default_factory=list)
    norm_sq_G: list[np.ndarray] = field(default_factory=list)
    cosine_G: list[np.ndarray] = field(default_factory=list)
    mass_G: list[np.ndarray] = field(default_factory=list)
    num_evicted_G: list[np.ndarray] = field(default_factory=list)
    is_clipped: bool = False
    is_clamped: bool = False

    def add(self, layer: LayerSpec, result: Replay, n: int, at: int) -> None:
        """Take layer number ``at`` of a stack for the ``n``-th policy of its family."""
        self.layers.append(layer)
        self.held_GR.append(result.held_NLGR[n, at])
        self.full_R.append(result.full_R)
        self.error_sq_G.append(_by_group(result.error_sq_NLHR[n, at], layer).sum((1, 2)))
        self.norm_sq_G.append(_by_group(result.norm_sq_LHR[at], layer).sum((1, 2)))
        self.cosine_G.append(_by_group(result.cosine_NLHR[n, at], layer).mean((1, 2)))
        self.mass_G.append(_by_group(result.mass_kept_NLHR[n, at], layer).mean((1, 2)))
        self.num_evicted_G.append(result.num_evicted_NLG[n, at])
        self.is_clipped |= bool(result.is_clipped_N[n])
        self.is_clamped |= bool(result.is_clamped_N[n])


def _by_group(values_HR: np.ndarray, layer: LayerSpec) -> np.ndarray:
    """Return query-head values as [G, M, R], in float64."""
    shape = (layer.num_kv_heads, layer.group_size, -1)
    return np.asarray(values_HR, dtype=np.float64).reshape(shape)


def replay_sequence(
    trace: Trace,
    sequence: pd.Series[Any],
    families: Sequence[Sequence[Policy]],
    spans: Spans,
    *,
    seed: int,
    bytes_per_number: int,
) -> dict[str, pa.Table]:
    """Return, by policy text, the rows of ``schema.KV_RESULTS`` on one sequence.

    Parameters
    ----------
    trace
        Recorded with queries, keys and values.
    sequence
        Its row of ``trace.sequences``.
    families
        Policies; those of one family differ in the kept amount alone.
    spans
        Where the sequence's context, prompt and turns end.
    seed
        Of random policies on this sequence.
    bytes_per_number
        For the accounting.

    Returns
    -------
    dict
        Rows for each layer and KV head, each layer, and all together; policies whose eviction
        point the sequence does not have are left out.
    """
    tallies: dict[str, _Tally] = {}
    for layers, tensors in _stacks(trace, str(sequence["sequence_id"])):
        reference = Reference(**tensors, layer=layers[0])
        for family in families:
            result = replay(
                family, reference, layers=[one.index for one in layers], spans=spans, seed=seed
            )
            if result is None:
                continue
            # A window of text scores again what the window before it has scored: it is cut off.
            result = result.since(int(sequence["scored_from"]) - 1)
            for n, policy in enumerate(family):
                tally = tallies.setdefault(policy.text, _Tally())
                for at, layer in enumerate(layers):
                    tally.add(layer, result, n, at)
    policies = {policy.text: policy for family in families for policy in family}
    return {
        text: _rows(policies[text], tally, spans, sequence, bytes_per_number)
        for text, tally in tallies.items()
    }


def _stacks(
    trace: Trace, sequence_id: str
) -> Iterator[tuple[list[LayerSpec], dict[str, torch.Tensor]]]:
    """Yield runs of like layers with their stacked tensors, each run of bounded size."""
    stored = set(trace.stored_layers(sequence_id))
    layers = [
        one
        for one in trace.spec.layers
        if one.index in stored and one.holds_keys and not one.refusal
    ]
    for _, alike in groupby(layers, key=_shape):
        run = list(alike)
        first = trace.attention_inputs(sequence_id, run[0].index)
        size = max(1, STACK_BYTES // sum(block.data.nbytes for block in first.values()))
        for start in range(0, len(run), size):
            part = run[start : start + size]
            blocks = [trace.attention_inputs(sequence_id, one.index) for one in part]
            names = {"query": "query_LHTD", "key": "key_LGTD", "value": "value_LGTD"}
            yield (
                part,
                {
                    name: torch.stack([to_torch(b[kind].data, b[kind].dtype) for b in blocks])
                    for kind, name in names.items()
                },
            )


def _shape(layer: LayerSpec) -> tuple[Any, ...]:
    """Return what layers must share to be replayed together; layers with sinks go alone."""
    alone = layer.index if layer.sinks is not None else None
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.value_dim,
        layer.scale,
        layer.window,
        layer.softcap,
        alone,
    )


def _rows(
    policy: Policy,
    tally: _Tally,
    spans: Spans,
    sequence: pd.Series[Any],
    bytes_per_number: int,
) -> pa.Table:
    """Return the result rows of one policy: heads, layers, and all together."""
    rows: list[dict[str, Any]] = []
    for at, layer in enumerate(tally.layers):
        parts = {head: slice(head, head + 1) for head in range(layer.num_kv_heads)}
        parts[schema.ALL] = slice(None)
        rows += [
            {"layer": layer.index, "kv_head": kv_head}
            | _measures(policy, tally, [(at, heads)], bytes_per_number)
            for kv_head, heads in parts.items()
        ]
    whole = [(at, slice(None)) for at in range(len(tally.layers))]
    rows.append(
        {"layer": schema.ALL, "kv_head": schema.ALL}
        | _measures(policy, tally, whole, bytes_per_number)
    )
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    shared = {
        "sequence_id": sequence["sequence_id"],
        "domain": sequence["domain"],
        "policy": policy.text,
        "family": policy.family,
        "level": "local",
        "evict_at": policy.schedule.text,
        "query_aware": policy.schedule.query_aware(spans),
        "bucket": length_bucket(int(sequence["num_tokens"])),
        "target_frac": policy.target_frac(spans),
        "is_clipped": tally.is_clipped,
        "is_clamped": tally.is_clamped,
        "num_scored": len(tally.full_R[0]),
    }
    return schema.KV_RESULTS.build(len(rows), columns | shared)


def _measures(
    policy: Policy, tally: _Tally, parts: list[tuple[int, slice]], bytes_per_number: int
) -> dict[str, Any]:
    """Return the measures over some KV heads of some layers (``parts``: layer and heads)."""
    held_PR, padded_PR, full_PR, entries_PR = [], [], [], []
    for at, heads in parts:
        layer = tally.layers[at]
        held_GR = tally.held_GR[at][heads].astype(np.float64)
        entry_bytes = bytes_per_number * (layer.head_dim + layer.value_dim)
        held_PR.append(entry_bytes * held_GR.sum(0))
        padded_PR.append(entry_bytes * len(held_GR) * held_GR.max(0))
        full_PR.append(entry_bytes * len(held_GR) * tally.full_R[at])
        entries_PR.append(held_GR.sum(0))
    held_R, padded_R, full_R, entries_R = (
        np.sum(one, axis=0) for one in (held_PR, padded_PR, full_PR, entries_PR)
    )
    errors = [
        np.sqrt(tally.error_sq_G[at][heads].sum() / max(tally.norm_sq_G[at][heads].sum(), 1e-300))
        for at, heads in parts
    ]
    kept_frac = float(np.mean(held_R / full_R))
    return {
        "kept_frac": kept_frac,
        "kept_end_frac": float(held_R[-1] / full_R[-1]),
        "peak_frac": float(held_R.max() / full_R.max()),
        "padded_frac": float(np.mean(padded_R / full_R)),
        # Eviction reads all that it holds; selectors, which read less, come with their own.
        "read_frac": kept_frac,
        "kv_bytes": float(held_R.mean()),
        "full_kv_bytes": float(full_R.mean()),
        "state_bytes": float(policy.scorer.state_bytes_per_entry * entries_R.mean()),
        "num_evicted": int(sum(tally.num_evicted_G[at][heads].sum() for at, heads in parts)),
        "output_error": float(np.mean(errors)),
        "output_cosine": float(np.mean([tally.cosine_G[at][heads].mean() for at, heads in parts])),
        "mass_kept": float(np.mean([tally.mass_G[at][heads].mean() for at, heads in parts])),
    }


BUCKETS = ((256, "< 256"), (1024, "256 - 1k"), (4096, "1k - 4k"), (16384, "4k - 16k"))
"""Length buckets: upper end (exclusive) in tokens, and name."""


def length_bucket(num_tokens: int) -> str:
    """Return the name of the length bucket of a sequence."""
    return next((name for end, name in BUCKETS if num_tokens < end), ">= 16k")
