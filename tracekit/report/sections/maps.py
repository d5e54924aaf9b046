"""Where in the model it hurts: layers and KV heads, measured, and whether shallow ones mind least."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.report.blocks import Absent, Block, Heading, Items, Section, Text
from tracekit.report.figures.layer_map import head_error_map, layer_map
from tracekit.report.figures.layer_need import layer_need
from tracekit.report.figures.measure import ERROR, nearest
from tracekit.report.figures.sensitivity_map import heads_map, layers_map, rules_of
from tracekit.report.formats import number, percent
from tracekit.schema import ALL
from tracekit.simulate.sensitivity import PROTECTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

MOST_RULES = 3
"""Rules of a sweep that have a map of KV heads."""

_SWEEP = "tracekit simulate TRACE -o RESULTS --layers"


def section(results: Results, options: Options) -> Section | Absent:
    """Return maps by layer, policy and KV head, and what each layer needs."""
    del options
    curves = results.curves("kv", ERROR.column)
    chosen = {name: nearest(curve) for name, curve in curves.items()}
    swept = results.table(schema.LAYER_SUMMARY)
    by_policy = layer_map(results, chosen)
    blocks: list[Block] = [] if by_policy is None else [by_policy]
    blocks += _sensitivity(swept) or _local_heads(results, chosen)
    blocks += _need(results.table(schema.RECOMMENDED))
    if not blocks:
        return Absent(what="Losses by layer and KV head", command=f"{_SWEEP} --heads")
    if swept.empty:
        blocks.append(Absent(what="Layers and KV heads pruned one at a time", command=_SWEEP))
    elif not (swept["kv_head"] != ALL).any():
        blocks.append(Absent(what="KV heads pruned one at a time", command=f"{_SWEEP} --heads"))
    return Section(name="maps", title="Where it hurts", short="Maps", blocks=tuple(blocks))


def _sensitivity(swept: pd.DataFrame) -> list[Block]:
    """Return the maps of a sweep, the layers to protect, and whether shallow layers mind least."""
    layers = layers_map(swept)
    if layers is None:
        return []
    rules = rules_of(swept)
    heads = [heads_map(swept, rule, place) for place, rule in enumerate(rules[:MOST_RULES])]
    return [
        Heading(text="Which layers the model minds"),
        layers,
        Items(items=tuple((rule, _of_rule(swept, rule)) for rule in rules)),
        Text(text=PROTECTED, look="rule"),
        *(one for one in heads if one is not None),
    ]


def _of_rule(swept: pd.DataFrame, rule: str) -> str:
    """Return the layers and heads to protect under one rule, and how layers are ordered."""
    rows = swept[swept["rule"] == rule]
    layers, heads = rows[rows["kv_head"] == ALL], rows[rows["kv_head"] != ALL]
    kl_by_layer = layers.dropna(subset="kl_nats").set_index("layer")["kl_nats"]
    told = f"layers to protect: {_protected(layers)}. "
    if len(heads):
        told += f"KV heads to protect: {_protected(heads)}. "
    return told + trend(kl_by_layer, "sensitivity (KL)")


def _protected(rows: pd.DataFrame) -> str:
    """Return what stands out, most sensitive first, with its share of the KL."""
    if rows["is_protected"].isna().all():
        return "no claim below 3 sequences"
    named = rows[rows["is_protected"].eq(True)].sort_values("rank")
    places = [
        f"{row['layer']}"
        + ("" if row["kv_head"] == ALL else f".{row['kv_head']}")
        + f" ({percent(row['share'])} of the KL)"
        for row in named.to_dict("records")
    ]
    return ", ".join(places) or "none stands out"


def _local_heads(results: Results, chosen: Mapping[str, Point]) -> list[Block]:
    """Return the local error by KV head under the best policy at about a half.

    Transforms of all entries (asked to keep all) come last: they tell little of what to evict.
    """
    causal = [point for point in chosen.values() if point.causal]
    for point in sorted(causal, key=lambda one: (one.asked >= 1, one.mean, one.name)):
        if figure := head_error_map(results, point):
            return [Heading(text="Which KV heads lose most"), figure]
    return []


def _need(recommended: pd.DataFrame) -> list[Block]:
    """Return what each layer needs, and whether the data support that shallow ones need least."""
    rows = recommended.dropna(subset="kept_frac")
    if rows.empty:
        return []
    needed = rows.set_index("layer")["kept_frac"]
    return [
        Heading(text="How much each layer needs"),
        Text(text=f"{_thirds(needed)} {trend(needed, 'the kept fraction needed')}"),
        layer_need(rows),
    ]


def _thirds(needed: pd.Series[float]) -> str:
    """Return what the shallow and the deep third need, beside what is often told."""
    third = max(1, len(needed) // 3)
    by_depth = needed.sort_index()
    shallow, deep = float(by_depth.iloc[:third].mean()), float(by_depth.iloc[-third:].mean())
    return (
        f"The shallowest third of the layers needs {percent(shallow)} on average, the deepest third "
        f"{percent(deep)}; the claim that shallow layers may lose 80\u00a0% and deep ones 30\u00a0% "
        "would be 20\u00a0% and 70\u00a0%."
    )


def trend(by_layer: pd.Series[float], what: str) -> str:
    """Return whether a number rises with depth: "shallow layers tolerate most" as the data have it.

    Parameters
    ----------
    by_layer
        A number a layer, indexed by layer.
    what
        What it is; more of it is less tolerance.
    """
    by_depth = by_layer.sort_index()
    found = rank_correlation(by_depth)
    if math.isnan(found):
        return f"Whether {what} follows depth cannot be told from {len(by_depth)} layers."
    chance = 1.96 / math.sqrt(len(by_depth) - 1)
    if chance >= 1:
        return f"Whether {what} follows depth cannot be told: {len(by_depth)} layers are too few."
    words = "supports" if found > chance else "refutes" if found < -chance else "cannot tell about"
    return (
        f"Rank correlation of {what} with depth: {number(found, 2)} over {len(by_depth)} layers "
        f"(layers without order stay within {number(chance)} in 19 of 20 cases). That {words} "
        '"shallow layers tolerate most" here.'
    )


def rank_correlation(by_depth: pd.Series[float]) -> float:
    """Return Spearman's correlation of a series with its order; NaN where there is none."""
    ranks = by_depth.rank()
    if len(ranks) < 3 or ranks.nunique() < 2:
        return float("nan")
    depth = by_depth.reset_index(drop=True).index.to_series().rank()
    return float(ranks.reset_index(drop=True).corr(depth))
