"""Sensitivity of layers and heads over sequences, and which layers are to be protected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES, bootstrap_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

PROTECTED = (
    "A layer is to be protected if its KL, less the mean over layers of the same sequence, has a "
    "95 % bootstrap interval over sequences above 0, and its mean KL is above that of rounding; "
    f"below {MIN_SEQUENCES} sequences nothing is claimed."
)
"""The rule, for everybody who shows it. The difference is taken within a sequence because texts
differ in all layers at once. It names layers that stand out, not a fixed number of them: of layers
that are all alike about one in forty would be named by chance."""


def summarise_layers(rows: pd.DataFrame, *, seed: int) -> dict[str, Any]:
    """Return the columns of ``schema.LAYER_SUMMARY``.

    Parameters
    ----------
    rows
        Of ``schema.LAYER_RESULTS``, any number of sequences.
    seed
        Of the bootstrap; sequences are resampled, not tokens.

    Returns
    -------
    dict
        By rule, layers before KV heads, in order. Shares and ranks are taken among layers, and
        among the KV heads of all layers. Sequences on which a rule found nothing to drop are left
        out where that is so, and counted. ``is_protected`` follows ``PROTECTED``.
    """
    found: list[dict[str, Any]] = []
    is_head = (rows["kv_head"] != schema.ALL).rename("is_head")
    for (rule, _), cells in rows.groupby(["rule", is_head], observed=True, sort=False):
        made = [one | {"rule": str(rule)} for one in _places(cells, seed)]
        means = np.array([np.nan if one["kl_nats"] is None else one["kl_nats"] for one in made])
        total = np.nansum(means)
        rank = np.where(np.isnan(means), 0, (means[:, None] < means).sum(1) + 1)
        for one, mean, place in zip(made, means, rank, strict=True):
            known = bool(place)
            one["share"] = float(mean / total) if known and total > 0 else None
            one["rank"] = int(place) if known else None
        found += made
    return {one.name: [row[one.name] for row in found] for one in schema.LAYER_SUMMARY.columns}


def _places(cells: pd.DataFrame, seed: int) -> Iterator[dict[str, Any]]:
    """Yield each layer, or each KV head, of one rule over sequences."""
    counted = cells.assign(kl_nats=cells["kl_nats"].where(~cells["is_idle"].astype(bool)))
    # By sequence: how sensitive a text makes all layers.
    level = counted.groupby("sequence_id", observed=True)["kl_nats"].transform("mean")
    counted = counted.assign(
        above=counted["kl_nats"] - level,
        change=(counted["nll_pruned"] - counted["nll_full"]).where(counted["kl_nats"].notna()),
    )
    for _, place in counted.groupby(["layer", "kv_head"], sort=True):
        kl = bootstrap_mean(place["kl_nats"].to_numpy(np.float64), seed=seed)
        above = bootstrap_mean(place["above"].to_numpy(np.float64), seed=seed)
        noise = float(place["noise_kl_nats"].mean())
        stands_out = None
        if kl.mean is not None and above.low is not None:
            stands_out = above.low > 0 and kl.mean > noise
        yield {
            "layer": int(place["layer"].iloc[0]),
            "kv_head": int(place["kv_head"].iloc[0]),
            "level": str(place["level"].iloc[0]),
            "kl_nats": kl.mean,
            "low": kl.low,
            "high": kl.high,
            "n": kl.n,
            "num_excluded": len(place) - kl.n,
            "nll_change": bootstrap_mean(place["change"].to_numpy(np.float64), seed=seed).mean,
            "noise_kl_nats": noise,
            "is_protected": stands_out,
        }
