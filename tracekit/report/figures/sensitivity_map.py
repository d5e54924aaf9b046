"""Which layers and KV heads the model minds: the KL of pruning one of them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit.report.figures.heat import layer_heat
from tracekit.report.formats import number, percent, sample_sizes
from tracekit.schema import ALL

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.figures.figure import Map

_NUMBERS = [
    "rule",
    "layer",
    "kv_head",
    "level",
    "kl_nats",
    "low",
    "high",
    "n",
    "num_excluded",
    "share",
    "noise_kl_nats",
    "is_protected",
]


def rules_of(rows: pd.DataFrame) -> list[str]:
    """Return the rules of a sweep, in the order in which they were run."""
    return [str(rule) for rule in dict.fromkeys(rows["rule"])]


def layers_map(rows: pd.DataFrame) -> Map | None:
    """Return each layer's share of the KL by rule, layers to protect marked; None without KL.

    Parameters
    ----------
    rows
        Of ``schema.LAYER_SUMMARY``. Shares make rules comparable whose KL differ by decades.
    """
    layers = rows[(rows["kv_head"] == ALL) & rows["share"].notna()]
    if layers.empty:
        return None
    rules = rules_of(layers)
    share_LR = layers.pivot_table(index="layer", columns="rule", values="share")[rules]
    share_LR = share_LR.reindex(range(int(layers["layer"].max()) + 1))
    totals = layers.groupby("rule")["kl_nats"].sum()
    sums = ", ".join(f"{rule} {number(float(totals[rule]))}" for rule in rules)
    return layer_heat(
        "sensitivity-by-layer",
        share_LR.to_numpy(np.float64),
        [rule.replace(":", ": ").replace(",", ", ") for rule in rules],
        write=percent,
        caption=(
            f"Level {layers['level'].iloc[0]}: one layer is pruned alone, all others full; its part "
            f"of the KL summed over layers, by rule ({sample_sizes(layers['n'])} sequences; sums in "
            f"nats a token: {sums}). Marked rows: layers to protect under one of the rules."
        ),
        what="sensitivity (share of the KL) by layer and rule",
        table=layers[_NUMBERS],
        marked={int(layer) for layer in layers.loc[layers["is_protected"].eq(True), "layer"]},
    )


def heads_map(rows: pd.DataFrame, rule: str, place: int) -> Map | None:
    """Return the KL by layer and KV head under one rule; None where heads were not swept.

    Parameters
    ----------
    rows
        Of ``schema.LAYER_SUMMARY``.
    rule
        One of ``rules_of(rows)``.
    place
        Its number there, for the name of the figure.
    """
    heads = rows[(rows["rule"] == rule) & (rows["kv_head"] != ALL) & rows["kl_nats"].notna()]
    if heads.empty:
        return None
    kl_LG = np.full((int(heads["layer"].max()) + 1, int(heads["kv_head"].max()) + 1), np.nan)
    kl_LG[heads["layer"], heads["kv_head"]] = heads["kl_nats"]
    return layer_heat(
        f"sensitivity-by-head-{place}",
        kl_LG,
        [f"head {number}" for number in range(kl_LG.shape[1])],
        write=number,
        caption=(
            f"Level {heads['level'].iloc[0]}: KL in nats a token, mean over sequences "
            f"({sample_sizes(heads['n'])}), of pruning one KV head alone by {rule}, all others full. "
            "Marked rows: layers with a head to protect."
        ),
        what=f"KL by layer and KV head under {rule}",
        table=heads[_NUMBERS],
        marked={int(layer) for layer in heads.loc[heads["is_protected"].eq(True), "layer"]},
    )
