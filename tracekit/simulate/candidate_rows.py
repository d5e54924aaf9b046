"""What was tried on one sequence, as rows: means, steps, and a few whole rankings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from tracekit import schema
from tracekit.measure.backoff import causal_backoff_kl_nats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracekit.measure.head import Head
    from tracekit.vocab.engine import Tried

MEANS = {
    "hit_chosen": "hit_chosen",
    "hit_argmax": "hit_argmax",
    "hit_top_k": "hit_top_k",
    "hit_top_p": "hit_top_p",
    "hit_min_p": "hit_min_p",
    "neg_log_mass_nats": "neg_log_mass_nats",
    "jsd_nats": "jsd_nats",
    "backoff_kl_nats": "backoff_kl_nats",
    "backoff_kl_causal_nats": "backoff_kl_causal_nats",
    "set_size": "set_size_mean",
    "is_fallback": "fallback_frac",
    "nll_backoff": "nll_backoff",
    "mass": "mass",
    "nll_full": "nll_full",
}
"""Column of the results by that of the steps whose mean it is."""


def candidate_tables(
    tried: Sequence[Tried],
    sizes: Sequence[int],
    position_S: np.ndarray,
    head: Head,
    shared: Mapping[str, Any],
) -> dict[str, pa.Table]:
    """Return rows of ``schema.VOCAB_RESULTS``, ``CANDIDATES`` and ``CANDIDATE_SETS``, by table name.

    Parameters
    ----------
    tried
        One scheme, once a fit.
    sizes
        Sizes asked.
    position_S
        Positions of the predicted tokens.
    head
        The head, for what it costs.
    shared
        ``sequence_id``, ``domain``, ``bucket``.
    """
    parts: dict[str, list[pa.Table]] = {"vocab": [], "candidates": [], "candidate_sets": []}
    for one in tried:
        scheme, columns = one.asked.scheme, _with_causal(one, head.spec.num_rows)
        named = {"estimator": scheme.estimator.text, "controller": scheme.control}
        named |= {"fit": one.asked.fit, "sequence_id": shared["sequence_id"]}
        means = {MEANS[name]: columns[name].mean(0) for name in MEANS}
        rows = dict(shared) | named | means | _costs(one, means["set_size_mean"], head)
        rows |= {"size": list(sizes), "num_scored": len(position_S)}
        parts["vocab"].append(schema.VOCAB_RESULTS.build(len(sizes), rows))
        parts["candidates"].append(_steps(columns, sizes, position_S, named))
        parts["candidate_sets"].append(_sets(one, position_S, named))
    return {name: pa.concat_tables(some).unify_dictionaries() for name, some in parts.items()}


def _with_causal(one: Tried, num_rows: int) -> dict[str, np.ndarray]:
    """Return the columns, with what follows from them by formula."""
    columns = one.columns
    causal = causal_backoff_kl_nats(
        torch.from_numpy(columns["missing_mass"]),
        torch.from_numpy(columns["set_size"]),
        torch.from_numpy(columns["backoff_kl_nats"]),
        num_rows,
    )
    return columns | {
        "backoff_kl_causal_nats": causal.numpy(),
        "mass": np.exp(-columns["neg_log_mass_nats"]),
    }


def _costs(one: Tried, set_size_N: np.ndarray, head: Head) -> dict[str, np.ndarray]:
    """Return what naming and scoring the sets costs over what the full head costs."""
    bytes_N, macs_N = (
        np.array([getattr(cost, name) for cost in one.cost_N]) for name in ("bytes", "macs")
    )
    return {
        "cost_frac": (set_size_N * head.bytes_per_row + bytes_N) / head.num_bytes,
        "macs_frac": (set_size_N * head.spec.hidden_size + macs_N) / head.macs,
    }


def _steps(
    columns: dict[str, np.ndarray],
    sizes: Sequence[int],
    position_S: np.ndarray,
    named: Mapping[str, Any],
) -> pa.Table:
    """Return a row a size and step, the steps of a size together."""
    known = {column.name for column in schema.CANDIDATES.columns}
    flat: dict[str, Any] = {
        name: values_SN.T.ravel() for name, values_SN in columns.items() if name in known
    }
    flat |= {"position": np.tile(position_S, len(sizes)), "size": np.repeat(sizes, len(position_S))}
    return schema.CANDIDATES.build(len(flat["size"]), flat | dict(named))


def _sets(one: Tried, position_S: np.ndarray, named: Mapping[str, Any]) -> pa.Table:
    """Return the rankings of a few steps."""
    ids = pa.array([ids_K.astype(np.int32) for ids_K in one.samples.values()], pa.list_(pa.int32()))
    rows = {name: named[name] for name in ("sequence_id", "estimator", "controller")}
    rows |= {"position": position_S[list(one.samples)], "ids": ids}
    return schema.CANDIDATE_SETS.build(len(one.samples), rows)
