"""Claims about which layers tolerate eviction, and about what else is done to the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES, paired_difference
from tracekit.report.claims.claim import (
    REFUTED,
    SUPPORTED,
    UNTOLD,
    Claim,
    Said,
    claim,
    untold,
    verdict_of,
)
from tracekit.report.estimates import between, short
from tracekit.report.formats import percent
from tracekit.report.verdict.sides import all_of, is_above, is_below
from tracekit.report.verdict.yardstick import yardsticks

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from tracekit.report.load import Results
    from tracekit.report.options import Options

SHALLOW_KEPT, DEEP_KEPT = 0.20, 0.70
"""What shallow layers that lose 80 % keep, and deep ones that lose 30 %."""


@claim(
    "Shallow layers tolerate most",
    rule=(
        "one layer changed at a time: the mean KL of the first third of layers less that of the "
        "last third, by sequence; supported if the interval is below 0 under every rule swept, not "
        "supported if above 0 under every one"
    ),
)
def shallow_layers(results: Results, options: Options) -> Said:
    """Judge depth by the sweep over layers."""
    del options
    rows = results.table(schema.LAYER_RESULTS)
    rows = rows[(rows["kv_head"] == schema.ALL) & rows["kl_nats"].notna()]
    if rows.empty:
        return untold("no layer was changed alone (tracekit simulate --layers)")
    seed = results.run["seed"]
    parts, sides, ns = [], [], []
    for rule, swept in rows.groupby("rule", sort=True):
        first, last = _thirds(swept)
        found = paired_difference(first, last, seed=seed)
        sides.append(is_below(found.low, found.high))
        ns.append(found.n)
        mean = 0.0 if found.mean is None else found.mean
        parts.append(f"{rule}: {short(mean)}\u00a0nats a token {between(found, short)}")
    says = f"{'; '.join(parts)}, level {rows['level'].iloc[0]}"
    return Said(verdict_of(all_of(sides)), says, str(min(ns)))


def _thirds(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean KL of the first and of the last third of layers, one value a sequence."""
    table = rows.pivot_table(index="sequence_id", columns="layer", values="kl_nats")
    third = max(1, table.shape[1] // 3)
    return (
        table.iloc[:, :third].mean(axis=1).to_numpy(),
        table.iloc[:, -third:].mean(axis=1).to_numpy(),
    )


@claim(
    "Shallow layers may lose 80\u00a0%, deep ones 30\u00a0%",
    rule=(
        "what layers need to keep the attention mass that is asked for: supported if the upper "
        f"ends of the first third are at most {percent(SHALLOW_KEPT)} in the mean and those of the "
        f"last third at most {percent(DEEP_KEPT)}; not supported if a lower end is above in the mean"
    ),
)
def tiers(results: Results, options: Options) -> Said:
    """Judge the two tiers by the kept fraction that each layer's attention asks for."""
    del options
    rows = results.table(schema.RECOMMENDED).sort_values("layer")
    if rows.empty or rows["low"].isna().all():
        return untold("no kept fraction by layer with an interval (tracekit simulate --attention)")
    third = max(1, len(rows) // 3)
    parts = {"first": (rows.head(third), SHALLOW_KEPT), "last": (rows.tail(third), DEEP_KEPT)}
    means = {name: part[["kept_frac", "low", "high"]].mean() for name, (part, _) in parts.items()}
    bounds = {name: bound for name, (_, bound) in parts.items()}
    verdict = UNTOLD
    if all(means[name]["high"] <= bounds[name] for name in parts):
        verdict = SUPPORTED
    elif any(means[name]["low"] > bounds[name] for name in parts):
        verdict = REFUTED
    says = "; ".join(
        f"the {name} third needs {percent(mean['kept_frac'])} [{percent(mean['low'])}, "
        f"{percent(mean['high'])}] for {percent(rows['mass_frac'].iloc[0])} of the mass"
        for name, mean in means.items()
    )
    return Said(verdict, f"{says}, level {rows['level'].iloc[0]}", str(int(rows["n"].min())))


@claim(
    "Eviction and quantisation multiply their errors",
    rule=(
        "together less the sum of both alone, highest level: supported if the interval is above 0 "
        "for all policies stacked, not supported if below 0 for all"
    ),
)
def stacking_multiplies(results: Results, options: Options) -> Said:
    """Judge the interaction of each stacked policy."""
    rows = results.table(schema.STACKING)
    rows = rows[(rows["n"] > 0) & (rows["measure"] != "output_error") & rows["low"].notna()]
    for yardstick in yardsticks(results, options):
        part = rows[rows["level"] == yardstick.level]
        if part.empty:
            continue
        ends = part[["low", "high"]].itertuples(index=False, name=None)
        sides = [is_above(low, high) for low, high in ends]
        most = part.sort_values(["interaction", "policy"]).iloc[-1]
        says = (
            f"the interaction is above 0 for {sides.count(True)} of {len(part)} stacked policies, "
            f"below 0 for {sides.count(False)}, not told for {sides.count(None)}; the largest "
            f"is {short(most['interaction'])} [{short(most['low'])}, {short(most['high'])}] "
            f"({most['measure']}, {most['policy']}), level {yardstick.level}"
        )
        return Said(verdict_of(all_of(sides)), says, str(int(part["n"].min())))
    return untold(f"no eviction was stacked with a transform on {MIN_SEQUENCES} sequences or more")


LAYER_CLAIMS: tuple[Claim, ...] = (shallow_layers, tiers, stacking_multiplies)
