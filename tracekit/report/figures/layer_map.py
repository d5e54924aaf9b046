"""Which layers a policy hurts: output error by layer and policy, one pixel a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit.report.figures.figure import Map
from tracekit.report.figures.pixels import pixels, scale
from tracekit.report.formats import percent
from tracekit.schema import ALL

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Results

WANTED_FRAC = 0.5
"""Kept fraction near which the map is drawn."""


def layer_map(results: Results) -> Map | None:
    """Return the map of mean output error by layer and policy; None without rows by layer.

    Each policy is taken at its mean kept fraction nearest ``WANTED_FRAC``. Cells of sequences in
    which a layer evicted nothing are not averaged.
    """
    rows = results.kv[(results.kv["level"] == "local") & (results.kv["kv_head"] == ALL)]
    kept = _chosen(rows[(rows["layer"] == ALL) & (rows["num_evicted"] > 0)])
    cells = rows[(rows["layer"] >= 0) & rows["policy"].isin(set(kept["policy"]))]
    counted = cells[(cells["num_evicted"] > 0) & cells["output_error"].notna()]
    if counted.empty:
        return None
    means = counted.pivot_table(index="layer", columns="family", values="output_error")
    error_LP = means.reindex(range(int(cells["layer"].max()) + 1)).to_numpy(dtype=np.float64)
    families = [str(family) for family in means.columns]
    top = float(np.nanmax(error_LP)) or 1.0
    layer, policy = divmod(int(np.nanargmax(error_LP)), len(families))
    pairs = zip(kept["family"], kept["kept_frac"], strict=True)
    fractions = ", ".join(f"{family} {percent(frac)}" for family, frac in pairs)
    return Map(
        name="error-by-layer",
        png=pixels(error_LP / top),
        legend_png=scale(),
        rows=tuple(str(number) for number in range(len(error_LP))),
        columns=tuple(families),
        row_axis="layer, 0 (the input side) at the top",
        legend=("0\u00a0%", percent(top / 2), percent(top)),
        caption=(
            f"Level {'local'}: relative error of the attention output of each layer, mean "
            f"over sequences, at the measured kept fraction nearest {percent(WANTED_FRAC)} "
            f"({fractions}). Layer 0 is at the top. Hatched: nothing was evicted there, so there "
            "is nothing to average."
        ),
        alt=(
            f"Map of output error by layer and policy: the largest is {percent(top)} "
            f"({families[policy]}, layer {layer}), the mean over all cells "
            f"{percent(float(np.nanmean(error_LP)))}."
        ),
        table=_numbers(cells, counted, kept),
    )


def _chosen(whole: pd.DataFrame) -> pd.DataFrame:
    """Return family, policy and kept_frac of each family's policy nearest the wanted fraction."""
    means = whole.groupby(["family", "policy"])["kept_frac"].mean().reset_index()
    means["distance"] = (means["kept_frac"] - WANTED_FRAC).abs()
    return means.sort_values(["family", "distance", "policy"]).drop_duplicates("family")


def _numbers(cells: pd.DataFrame, counted: pd.DataFrame, kept: pd.DataFrame) -> pd.DataFrame:
    """Return the cells as rows, with how many sequences count and how many are left out."""
    keys = ["family", "policy", "layer"]
    counts = counted.groupby(keys)["output_error"].agg(output_error="mean", n="size")
    table = cells.groupby(keys).size().to_frame("num_sequences").join(counts).reset_index()
    table["n"] = table["n"].fillna(0).astype(int)
    table["num_excluded"] = table["num_sequences"] - table["n"]
    table["kept_frac"] = table["policy"].map(kept.set_index("policy")["kept_frac"])
    return table[["family", "policy", "kept_frac", "layer", "output_error", "n", "num_excluded"]]
