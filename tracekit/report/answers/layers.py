"""Which layers mind most, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit import schema
from tracekit.report.answers.answer import Answer
from tracekit.report.estimates import short
from tracekit.report.formats import percent

if TYPE_CHECKING:
    from tracekit.report.load import Results


def layer_answer(results: Results) -> Answer | None:
    """Return which layers stand out under each rule that was swept; None without a sweep."""
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
        question="Which layers mind more than the others?",
        verdict=f"Under {rule}: {verdict}",
        findings=tuple(others),
        rule=(
            "Rule: one layer at a time is changed inside the model, all others full. A layer is to "
            "be protected if its KL stands out from the mean over layers of the same sequence, the "
            "95\u00a0% interval included, and is above that of rounding."
        ),
    )


def _layers(ranked: pd.DataFrame) -> str:
    """Return the layers that stand out, most sensitive first; else that none does, and a lead."""
    protected = ranked[ranked["is_protected"].eq(True)]
    if len(protected):
        listed = ", ".join(map(str, protected["layer"]))
        words = (
            f"{_of(len(protected), len(ranked))} stand{'s' * (len(protected) == 1)} out: {listed}"
        )
        return f"{words}. Most: {_told(protected.iloc[0])}."
    why = (
        "no claim, there are too few sequences"
        if ranked["is_protected"].isna().all()
        else f"no layer of {len(ranked)} stands out"
    )
    return f"{why}. The largest mean, no finding: {_told(ranked.iloc[0])}."


def _of(num: int, total: int) -> str:
    return f"{num} layer{'s' * (num != 1)} of {total}"


def _told(row: pd.Series[Any]) -> str:
    ends = f" [{short(row['low'])}, {short(row['high'])}]" if not pd.isna(row["low"]) else ""
    share = "" if pd.isna(row["share"]) else f", {percent(row['share'])} of the sum over layers"
    return (
        f"layer {row['layer']}, KL {short(row['kl_nats'])}\u00a0nats a token{ends}{share} "
        f"(n\u00a0=\u00a0{row['n']}, level {row['level']})"
    )
