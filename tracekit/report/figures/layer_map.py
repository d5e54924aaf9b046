"""Which layers and heads a policy hurts: local output error by layer and policy, or KV head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit.report.figures.heat import layer_heat
from tracekit.report.figures.measure import HALF
from tracekit.report.formats import percent, sample_sizes
from tracekit.schema import ALL

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from tracekit.report.figures.figure import Map
    from tracekit.report.load import Point, Results

_MEANING = "relative error of the attention output, mean over sequences"


def layer_map(results: Results, chosen: Mapping[str, Point]) -> Map | None:
    """Return the map of mean local output error by layer and policy; None without rows by layer.

    Parameters
    ----------
    results
        Read at level local. Sequences in which a layer evicted nothing are not averaged.
    chosen
        By family, the policy that is shown.
    """
    rows = results.kv[(results.kv["level"] == "local") & (results.kv["kv_head"] == ALL)]
    names = {point.name: family for family, point in chosen.items()}
    cells = rows[(rows["layer"] >= 0) & rows["policy"].isin(set(names))]
    counted = counted_rows(cells)
    if counted.empty:
        return None
    means = counted.pivot_table(index="layer", columns="family", values="output_error")
    error_LP = means.reindex(range(int(cells["layer"].max()) + 1)).to_numpy(dtype=np.float64)
    families = [str(family) for family in means.columns]
    fractions = ", ".join(f"{family} {percent(chosen[family].x)}" for family in families)
    table = _numbers(cells, counted, chosen)
    return layer_heat(
        "error-by-layer",
        error_LP,
        [one if chosen[one].causal else f"{one} (bound)" for one in families],
        write=percent,
        caption=(
            f"Level local: {_MEANING} ({sample_sizes(table.loc[table['n'] > 0, 'n'])}), each policy "
            f"at its measured kept fraction nearest {percent(HALF)} ({fractions})."
        ),
        what="local output error by layer and policy",
        table=table,
    )


def head_error_map(results: Results, shown: Point) -> Map | None:
    """Return the map of local output error by layer and KV head under one policy, if there is one."""
    rows = results.kv
    cells = rows[(rows["level"] == "local") & (rows["policy"] == shown.name)]
    counted = counted_rows(cells[(cells["layer"] >= 0) & (cells["kv_head"] >= 0)])
    if counted.empty:
        return None
    of_head = counted.groupby(["layer", "kv_head"])["output_error"]
    table = of_head.agg(output_error="mean", n="size").reset_index()
    error_LG = np.full((int(table["layer"].max()) + 1, int(table["kv_head"].max()) + 1), np.nan)
    error_LG[table["layer"], table["kv_head"]] = table["output_error"]
    return layer_heat(
        "error-by-head",
        error_LG,
        [f"head {number}" for number in range(error_LG.shape[1])],
        write=percent,
        caption=(
            f"Level local: {_MEANING} ({sample_sizes(table['n'])}), of each KV head under "
            f"{shown.family} at {percent(shown.x)} kept: of the evicting policies that a decoder can "
            "have, the best at about a half."
        ),
        what=f"local output error by layer and KV head under {shown.family}",
        table=table.assign(policy=shown.name),
    )


def counted_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in which something was evicted, or changed by a transform of all entries."""
    changed = (rows["num_evicted"] > 0) | (rows["target_frac"] >= 1)
    return rows[changed & rows["output_error"].notna()]


def _numbers(
    cells: pd.DataFrame, counted: pd.DataFrame, chosen: Mapping[str, Point]
) -> pd.DataFrame:
    """Return the cells as rows, with how many sequences count and how many are left out."""
    keys = ["family", "policy", "layer"]
    counts = counted.groupby(keys)["output_error"].agg(output_error="mean", n="size")
    table = cells.groupby(keys).size().to_frame("num_sequences").join(counts).reset_index()
    table["n"] = table["n"].fillna(0).astype(int)
    table["num_excluded"] = table["num_sequences"] - table["n"]
    table["kept_frac"] = table["family"].map({name: point.x for name, point in chosen.items()})
    return table[["family", "policy", "kept_frac", "layer", "output_error", "n", "num_excluded"]]
