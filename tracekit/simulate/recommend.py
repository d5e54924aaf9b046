"""The kept fraction of each layer that attention statistics suggest, and what it stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.errors import UsageError
from tracekit.measure.attention_shape import MASS_PERCENT
from tracekit.measure.stats import MIN_SEQUENCES

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES = 1000
"""Draws of the bootstrap."""

EVIDENCE = (
    "entropy_frac",
    "effective_keys",
    "keys_95_frac",
    "first_4_mass",
    "newest_32_mass",
    "half_life_rows",
    "kv_head_jaccard",
    "next_layer_jaccard",
)
"""Statistics of a layer that stand beside its recommended fraction, as means over sequences."""


def recommend(rows: pd.DataFrame, *, seed: int, mass_percent: int = 95) -> dict[str, Any]:
    """Return the columns of ``schema.RECOMMENDED``: a kept fraction for each layer.

    An estimate from attention mass alone, each layer's inputs unchanged (level local): what an
    oracle would need, with the first and the newest keys protected. It is no guarantee: values,
    later layers and policies that do not know the future are not in it.

    Parameters
    ----------
    rows
        Of ``schema.ATTENTION_RESULTS``, any number of sequences.
    seed
        Of the bootstrap; sequences are resampled, not rows.
    mass_percent
        Attention mass of each later row to be kept: one of ``MASS_PERCENT``.

    Returns
    -------
    dict
        ``kept_frac`` is the quantile over sequences, at the quantile that was used over rows, of
        what a layer needs; layers without queries and keys in the trace are left out.

    Raises
    ------
    UsageError
        If there is no such mass, or the rows were measured at several quantiles.
    """
    if mass_percent not in MASS_PERCENT:
        msg = f"no keys were counted for {mass_percent} % of the mass: choose from {MASS_PERCENT}."
        raise UsageError(msg)
    known = rows[rows[f"needed_frac_{mass_percent}"].notna()]
    quantiles = known["row_quantile"].unique()
    if len(quantiles) > 1:
        msg = f"rows measured at quantiles {sorted(map(float, quantiles))}: measure all at one."
        raise UsageError(msg)
    found = [
        _recommended(cells, mass_percent, seed) | {"layer": layer, "level": "local"}
        for layer, cells in known.groupby("layer", sort=True)
    ]
    return {one.name: [row[one.name] for row in found] for one in schema.RECOMMENDED.columns}


def _recommended(cells: pd.DataFrame, mass_percent: int, seed: int) -> dict[str, Any]:
    """Return the recommended fraction of one layer and what it stands on."""
    column, quantile = f"needed_frac_{mass_percent}", float(cells["row_quantile"].iloc[0])
    layer, heads = cells[cells["kv_head"] == schema.ALL], cells[cells["kv_head"] >= 0]
    of_heads = heads.groupby("sequence_id", observed=True)[column]
    return (
        _quantile_of(layer[column].to_numpy(np.float64), quantile, seed)
        | {
            "mass_frac": mass_percent / 100,
            "quantile": quantile,
            "num_scored": int(layer["num_scored"].sum()),
            "point_keys": float(layer["point_keys"].mean()),
            "mean_frac": float(layer[column].mean()),
            "oracle_frac": float(layer[f"oracle_frac_{mass_percent}"].mean()),
            "head_mean_frac": float(of_heads.mean().mean()),
            "head_max_frac": float(of_heads.max().mean()),
        }
        | {name: float(layer[name].mean()) for name in EVIDENCE}
    )


def _quantile_of(values_S: np.ndarray, quantile: float, seed: int) -> dict[str, Any]:
    """Return a quantile over sequences with its 95 % percentile bootstrap interval."""
    n = len(values_S)
    value = float(np.quantile(values_S, quantile, method="inverted_cdf"))
    if n < MIN_SEQUENCES:
        return {"kept_frac": value, "low": None, "high": None, "n": n}
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    draws = np.quantile(values_S[drawn], quantile, axis=1, method="inverted_cdf")
    low, high = np.quantile(draws, (0.025, 0.975), method="inverted_cdf")
    return {"kept_frac": value, "low": float(low), "high": float(high), "n": n}
