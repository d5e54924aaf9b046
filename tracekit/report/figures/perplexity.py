"""Change of perplexity by policy, of texts that were given: a model is blind to its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tracekit.measure.stats import bootstrap_mean
from tracekit.report.load import Point

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Results


def perplexity_changes(results: Results, x_name: str = "kept_frac") -> dict[str, list[Point]]:
    """Return exp(mean of nll_pruned - nll_full) - 1 over sequences of given text.

    Parameters
    ----------
    results
        Level propagated is read.
    x_name
        ``kept_frac`` for what frees memory, ``read_frac`` for recall policies.

    Returns
    -------
    dict
        By family, sorted: points with ascending x; empty without given text. The interval is that of
        the mean change of surprisal, carried over by exp. Idle cells are left out and counted, the
        full cache is no curve.
    """
    given = {
        one["sequence_id"] for one in results.run["sequences"] if one["text_source"] == "given"
    }
    rows = results.whole
    rows = rows[
        (rows["level"] == "propagated")
        & rows["sequence_id"].isin(given)
        & (rows["selects"] == (x_name == "read_frac"))
        & (rows["family"] != "full")
        & rows["nll_pruned"].notna()
    ]
    found: dict[str, list[Point]] = {}
    for (family, policy), cells in rows.groupby(["family", "policy"]):
        point = _point(str(family), str(policy), cells, x_name, results.run["seed"])
        if point is not None:
            found.setdefault(str(family), []).append(point)
    return {name: sorted(curve, key=lambda p: (p.x, p.name)) for name, curve in found.items()}


def _point(family: str, policy: str, cells: pd.DataFrame, x_name: str, seed: int) -> Point | None:
    counted = cells[~cells["is_idle"].astype(bool) | (cells["target_frac"] >= 1)]
    if counted.empty:
        return None
    change = (counted["nll_pruned"] - counted["nll_full"]).to_numpy(np.float64)
    mean = bootstrap_mean(change, seed=seed)
    return Point(
        family=family,
        name=policy,
        level="propagated",
        causal=bool(cells["causal"].iloc[0]),
        x_name=x_name,
        target=float(cells["target_frac"].iloc[0]),
        x=float(counted[x_name].mean()),
        mean=math.expm1(float(change.mean())),
        low=_change(mean.low),
        high=_change(mean.high),
        n=len(counted),
        num_excluded=len(cells) - len(counted),
    )


def _change(nats: float | None) -> float:
    return float("nan") if nats is None else math.expm1(nats)
