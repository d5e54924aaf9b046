"""Means over sequences with bootstrap intervals: by policy, by domain, by length bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.measure.stats import bootstrap_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

KV_MEASURES = (
    "output_error",
    "output_cosine",
    "projected_error",
    "mass_kept",
    "attention_kl_nats",
    "topk_overlap",
    "oracle_overlap",
    "needle_kept",
    "erased_frac",
    "read_frac",
    "kept_frac",
    "kept_end_frac",
    "peak_frac",
    "kv_bytes",
    "full_kv_bytes",
)
VOCAB_MEASURES = (
    "hit_chosen",
    "hit_argmax",
    "mass",
    "neg_log_mass_nats",
    "set_size_mean",
    "cost_frac",
    "macs_frac",
    "nll_full",
    "nll_backoff",
)


def summarise(kv: pd.DataFrame, vocab: pd.DataFrame, *, seed: int) -> dict[str, Any]:
    """Return the columns of ``schema.SUMMARY``.

    Parameters
    ----------
    kv, vocab
        Rows of ``schema.KV_RESULTS`` (those of all layers together are used) and
        ``schema.VOCAB_RESULTS``.
    seed
        Of the bootstrap; sequences are resampled, not tokens.

    Returns
    -------
    dict
        Sequences on which a policy evicted nothing are left out and counted, except for ``full``.
    """
    rows: list[dict[str, Any]] = []
    whole = kv[
        (kv["layer"] == schema.ALL) & (kv["kv_head"] == schema.ALL) & (kv["steps"] == schema.ANY)
    ]
    for text, cells in whole.groupby("policy", observed=True, sort=False):
        kept = cells[~cells["is_idle"] | (cells["target_frac"] >= 1)]
        shared = {
            "question": "kv",
            "family": cells["family"].iloc[0],
            "name": str(text),
            "level": cells["level"].iloc[0],
            "x_name": "kept_frac",
        }
        for part, rest in _parts(kept, cells):
            target = float(part["target_frac"].mean())
            x = float(part["kept_frac"].mean())
            rows += _measures(part, KV_MEASURES, shared | rest | {"x": x, "target": target}, seed)
    for _, cells in vocab.groupby(["estimator", "size"], observed=True, sort=False):
        text, size = str(cells["estimator"].iloc[0]), float(cells["size"].iloc[0])
        shared = {
            "question": "vocab",
            "family": text,
            "name": text,
            "level": "local",
            "x_name": "size",
            "x": size,
            "target": size,
        }
        for part, rest in _parts(cells, cells):
            rows += _measures(part, VOCAB_MEASURES, shared | rest, seed)
    names = [column.name for column in schema.SUMMARY.columns]
    return {name: [row[name] for row in rows] for name in names}


def _parts(
    kept: pd.DataFrame, cells: pd.DataFrame
) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """Yield all cells, then those of each domain, then those of each length bucket."""
    selections = [(schema.ANY, schema.ANY)]
    selections += [(str(domain), schema.ANY) for domain in sorted(cells["domain"].unique())]
    selections += [(schema.ANY, str(bucket)) for bucket in sorted(cells["bucket"].unique())]
    for domain, bucket in selections:
        part, everything = (
            frame[
                ((frame["domain"] == domain) | (domain == schema.ANY))
                & ((frame["bucket"] == bucket) | (bucket == schema.ANY))
            ]
            for frame in (kept, cells)
        )
        if len(part):
            excluded = len(everything) - len(part)
            yield part, {"domain": domain, "bucket": bucket, "num_excluded": excluded}


def _measures(
    part: pd.DataFrame, names: tuple[str, ...], shared: dict[str, Any], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield one summary row a measure."""
    for name in names:
        values = part[name].to_numpy(dtype=np.float64)
        interval = bootstrap_mean(values, seed=seed)
        yield shared | {
            "measure": name,
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "n": interval.n,
        }
