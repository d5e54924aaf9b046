"""Which layers mind most, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tracekit import schema
from tracekit.report.answers.answer import Answer
from tracekit.report.estimates import short
from tracekit.report.formats import percent

if TYPE_CHECKING:
    from tracekit.report.load import Results


def layer_answer(results: Results) -> Answer | None:
    """Return which layer minds most under each rule that was swept; None without a sweep."""
    rows = results.table(schema.LAYER_SUMMARY)
    layers = rows[(rows["kv_head"] == schema.ALL) & rows["kl_nats"].notna()]
    found = [
        (str(rule), _layers(part.sort_values(["rank", "layer"])))
        for rule, part in layers.groupby("rule", sort=True)
    ]
    if not found:
        return None
    (rule, verdict), *others = found
    return Answer(
        question="Which layers mind most?",
        verdict=f"Under {rule}: {verdict}",
        findings=tuple(others),
        rule=(
            "Rule: one layer at a time is changed inside the model, all others full. A layer is to "
            "be protected if its KL stands out from the mean over layers of the same sequence, the "
            "95\u00a0% interval included, and is above that of rounding."
        ),
    )


def _layers(ranked: pd.DataFrame) -> str:
    """Return the most sensitive layer and how many are to be protected."""
    first = ranked.iloc[0]
    ends = f" [{short(first['low'])}, {short(first['high'])}]" if not pd.isna(first["low"]) else ""
    protected = ranked.loc[ranked["is_protected"].eq(True), "layer"].sort_values()
    listed = ", ".join(map(str, protected)) or "none"
    if ranked["is_protected"].isna().all():
        listed = "no claim, there are too few sequences"
    share = "" if pd.isna(first["share"]) else f", {percent(first['share'])} of the sum over layers"
    return (
        f"layer {first['layer']} minds most, KL {short(first['kl_nats'])}\u00a0nats a token{ends}"
        f"{share} (n\u00a0=\u00a0{first['n']}, level {first['level']}); to be protected of "
        f"{len(ranked)}: {listed}."
    )
