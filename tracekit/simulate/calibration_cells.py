"""Sequences and cells on which levels are held against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit import schema

if TYPE_CHECKING:
    import pandas as pd

ESTIMATES = {"predicted": "kl_predicted_nats", "local": "output_error"}
"""By level, the column that is held against the propagated KL."""


def choose_calibrated(sequences: pd.DataFrame, count: int, seed: int) -> tuple[str, ...]:
    """Return sequences with influence probes, drawn by seed and spread evenly over domains.

    Parameters
    ----------
    sequences
        Rows of ``schema.SEQUENCES``.
    count
        Sequences wanted; where there are fewer, all of them are returned.
    seed
        Of the draw.

    Returns
    -------
    tuple
        Their ids, in the order of the trace. No domain has two more than another that has any left.
    """
    there = sequences[sequences["probed_from"].notna()]
    drawn = there.iloc[np.random.default_rng(seed).permutation(len(there))]
    # The first sequence drawn of each domain, then the second of each ...
    turn = drawn.groupby("domain", observed=True, dropna=False).cumcount().to_numpy()
    picked = set(drawn["sequence_id"].iloc[np.argsort(turn, kind="stable")[:count]])
    return tuple(str(name) for name in there["sequence_id"] if name in picked)


def calibration_cells(kv: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that have all three levels: a policy on a sequence.

    Parameters
    ----------
    kv
        Rows of ``schema.KV_RESULTS``; those of all layers and all steps together are used.

    Returns
    -------
    pandas.DataFrame
        One row a cell, sorted: ``sequence_id``, ``policy``, ``family``, ``target_frac``,
        ``is_bound`` (looks at later rows), ``is_idle`` (changes nothing), ``kl_nats``,
        ``noise_kl_nats``, ``kl_predicted_nats`` (nats a token), ``output_error``, all float64, and
        ``has_log`` (the propagated KL is above the noise floor, the prediction above 0).
    """
    of_all = (kv["layer"] == schema.ALL) & (kv["kv_head"] == schema.ALL)
    whole = kv[of_all & (kv["steps"] == schema.ANY)].astype({"sequence_id": str, "policy": str})
    own = ["family", "target_frac", "causal", "is_idle", "kl_nats", "noise_kl_nats"]
    names = {"propagated": own} | {level: [name] for level, name in ESTIMATES.items()}
    propagated, predicted, local = (
        whole[whole["level"] == level].set_index(["sequence_id", "policy"])[columns]
        for level, columns in names.items()
    )
    cells = propagated.join([predicted, local], how="inner").sort_index().reset_index()
    numbers = ["kl_nats", "noise_kl_nats", *ESTIMATES.values()]
    cells = cells.astype({**dict.fromkeys(numbers, np.float64), "causal": bool, "is_idle": bool})
    cells = cells.dropna(subset=["kl_nats", *ESTIMATES.values()]).fillna({"noise_kl_nats": 0.0})
    cells["is_bound"] = ~cells.pop("causal")
    cells["is_idle"] |= cells["output_error"] == 0  # the full cache
    above = cells["kl_nats"] > cells["noise_kl_nats"]
    cells["has_log"] = above & (cells["kl_predicted_nats"] > 0)
    return cells.reset_index(drop=True)


def counted_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that are evidence: bounds that look ahead and idle policies are none."""
    return cells[~cells["is_bound"] & ~cells["is_idle"]]
