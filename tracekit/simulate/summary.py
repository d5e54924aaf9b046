"""Means over sequences with bootstrap intervals: by policy, by domain, by length bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.measure.stats import bootstrap_mean
from tracekit.simulate.scheme_name import scheme_name
from tracekit.vocab.scheme import parse_scheme

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

KV_MEASURES = (
    "output_error",
    "output_cosine",
    "projected_error",
    "mass_kept",
    "attention_kl_nats",
    "kl_nats",
    "kl_predicted_nats",
    "kl_predicted_se_nats",
    "kl_corrected_nats",
    "noise_kl_nats",
    "jsd_nats",
    "nll_full",
    "nll_pruned",
    "same_top_frac",
    "topk_overlap",
    "oracle_overlap",
    "needle_kept",
    "erased_frac",
    "read_frac",
    "hit_frac",
    "read_bytes",
    "fetched_bytes",
    "transfer_s",
    "state_bytes",
    "kept_frac",
    "kept_end_frac",
    "peak_frac",
    "padded_frac",
    "kv_bytes",
    "full_kv_bytes",
)
VOCAB_MEASURES = (
    "hit_chosen",
    "hit_argmax",
    "hit_top_k",
    "hit_top_p",
    "hit_min_p",
    "mass",
    "neg_log_mass_nats",
    "jsd_nats",
    "backoff_kl_nats",
    "backoff_kl_causal_nats",
    "set_size_mean",
    "fallback_frac",
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
    for (text, level), frame in whole.groupby(["policy", "level"], observed=True, sort=False):
        cells = _Cells(frame, (*KV_MEASURES, "target_frac"))
        # Eviction and recall meet on one axis only: what a row reads.
        x_name = "read_frac" if frame["selects"].iloc[0] else "kept_frac"
        shared = {
            "question": "kv",
            "family": frame["family"].iloc[0],
            "name": str(text),
            "level": str(level),
            "causal": bool(frame["causal"].iloc[0]),
            "x_name": x_name,
        }
        counted = (~frame["is_idle"] | (frame["target_frac"] >= 1)).to_numpy(dtype=bool)
        for part, rest in cells.parts(counted):
            x, target = (float(part[name].mean()) for name in (x_name, "target_frac"))
            rows += _measures(part, KV_MEASURES, shared | rest | {"x": x, "target": target}, seed)
    # What no decoder can do, sizes fitted on the steps themselves, is for comparing controllers.
    vocab = vocab[vocab["fit"].isin(schema.DECODED_FITS)]
    by = ["estimator", "controller", "fit", "size"]
    for (*scheme, _), frame in vocab.groupby(by, observed=True, sort=False):
        text, size = scheme_name(*map(str, scheme)), float(frame["size"].iloc[0])
        parsed = parse_scheme(text)
        shared = {
            "question": "vocab",
            "family": parsed.short,
            "name": text,
            "level": "local",
            "causal": parsed.is_method,
            "x_name": "size",
            "x": size,
            "target": size,
        }
        for part, rest in _Cells(frame, VOCAB_MEASURES).parts(np.ones(len(frame), dtype=bool)):
            rows += _measures(part, VOCAB_MEASURES, shared | rest, seed)
    names = [column.name for column in schema.SUMMARY.columns]
    return {name: [row[name] for row in rows] for name in names}


class _Cells:
    """The sequences of one policy or estimator: what was measured, as arrays."""

    def __init__(self, frame: pd.DataFrame, names: tuple[str, ...]) -> None:
        self._domain, self._bucket = (
            frame[name].to_numpy(dtype=object) for name in ("domain", "bucket")
        )
        self._values = {name: frame[name].to_numpy(dtype=np.float64) for name in names}

    def parts(self, counted: np.ndarray) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Yield all sequences, then those of each domain, then those of each length bucket."""
        everything = np.ones(len(counted), dtype=bool)
        selections = [(schema.ANY, schema.ANY, everything)]
        selections += [(one, schema.ANY, self._domain == one) for one in sorted(set(self._domain))]
        selections += [(schema.ANY, one, self._bucket == one) for one in sorted(set(self._bucket))]
        for domain, bucket, chosen in selections:
            kept = chosen & counted
            if kept.any():
                part = {name: values[kept] for name, values in self._values.items()}
                excluded = int(chosen.sum() - kept.sum())
                yield part, {"domain": domain, "bucket": bucket, "num_excluded": excluded}


def _measures(
    part: dict[str, np.ndarray], names: tuple[str, ...], shared: dict[str, Any], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield one summary row a measure; one that nothing has a value of has none."""
    for name in names:
        if np.isnan(part[name]).all():
            continue
        interval = bootstrap_mean(part[name], seed=seed)
        yield shared | {
            "measure": name,
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "n": interval.n,
        }
