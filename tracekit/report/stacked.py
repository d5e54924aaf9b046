"""Eviction stacked with a transform: each alone, then together, and the rule of whether to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit import schema
from tracekit.report.blocks import Block, Heading
from tracekit.report.estimates import cell, short
from tracekit.report.formats import number, percent
from tracekit.report.tables import HtmlTable, text_column

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from tracekit.report.load import Results
    from tracekit.report.tables import Cell


def stacked(results: Results) -> list[Block]:
    """Return what eviction and a transform cost alone and together, and whether to stack them."""
    rows = results.table(schema.STACKING)
    rows = rows[(rows["n"] > 0) & (rows["measure"] != "output_error")]
    if rows.empty:
        return []
    cells: list[tuple[Cell, ...]] = [
        (
            cell(str(row["policy"])),
            cell(f"{row['level']}, {row['measure']}"),
            cell(percent(row["kept_frac"]), row["kept_frac"]),
            *(
                cell(short(row[name]), row[name])
                for name in ("eviction_mean", "transform_mean", "together_mean")
            ),
            cell(_interaction(row), row["interaction"]),
            cell(_may_stack(row)),
        )
        for row in rows.to_dict("records")
    ]
    bounds = rows.iloc[0]
    labels = "eviction with transform|level, measure|kept|eviction alone|transform alone|together"
    columns = (*labels.split("|"), "interaction", "stack?")
    caption = (
        "Interaction: together less the sum of both alone, on the same sequences, with its 95\u00a0% "
        "interval; above 0 they make each other worse. Rule: do not stack a transform that alone "
        f"makes an output error above {percent(bounds['error_bound'])} or costs more than "
        f"{number(bounds['perplexity_bound'])} points of perplexity."
    )
    table = HtmlTable(
        name="policies-stacking",
        caption=caption,
        columns=tuple(map(text_column, columns)),
        rows=tuple(cells),
    )
    return [Heading(text="Eviction stacked with a transform"), table]


def _interaction(row: Mapping[Hashable, Any]) -> str:
    ends = "" if pd.isna(row["low"]) else f" [{short(row['low'])},\u00a0{short(row['high'])}]"
    return f"{short(row['interaction'])}{ends} n={row['n']}"


def _may_stack(row: Mapping[Hashable, Any]) -> str:
    """Return the verdict of the rule: too costly where either bound is passed."""
    known = [row[name] for name in ("exceeds_error_bound", "exceeds_perplexity_bound")]
    known = [one for one in known if not pd.isna(one)]
    if not known:
        return "cannot be told"
    return "no: the transform alone costs too much" if any(known) else "yes, by this rule"
