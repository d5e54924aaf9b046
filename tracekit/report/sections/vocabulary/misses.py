"""What candidate sets leave out: the surest tokens that they missed, and of which class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Details, Text
from tracekit.report.formats import count, number, percent
from tracekit.report.tables import Column, build, text_column
from tracekit.report.verdict.schemes import with_family
from tracekit.schema import MISS_CLASSES, MISSES

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.blocks import Block
    from tracekit.report.load import Results
    from tracekit.report.sections.vocabulary.named import Named
    from tracekit.report.tables import HtmlTable

MOST_SHOWN = 20
"""Missed tokens that are listed of a scheme."""

SCHEMES = 2
"""Schemes whose misses are told: the named ones that cover most."""

MORE = 1.5
"""Lift from which a class is said to be missed more than its share, and ..."""
ENOUGH = 5
"""... misses of it that this takes."""


def misses(results: Results, named: Named) -> list[Block]:
    """Return the missed tokens and their classes of the schemes that cover most; [] of none."""
    schemes = named.methods[:SCHEMES]
    blocks: list[Block] = []
    classes = _at(results, results.table(MISS_CLASSES), schemes, named.size)
    if not classes.empty:
        by_class = _classes(classes, named.size)
        told = Details(summary="Missed tokens by class", blocks=(by_class,))
        blocks += [Text(text=_said(classes, schemes)), told]
    listed = _at(results, results.table(MISSES), schemes, named.size)
    for place, scheme in enumerate(schemes, 1):
        rows = listed[listed["family"] == scheme].sort_values("place")
        if not rows.empty:
            table = _listed(f"table-misses-{place}", rows, scheme, named.size)
            summary = f"The surest tokens that {scheme} missed, one by one"
            blocks.append(Details(summary=summary, blocks=(table,)))
    return blocks


def _at(results: Results, rows: pd.DataFrame, schemes: tuple[str, ...], size: int) -> pd.DataFrame:
    told = with_family(results, rows[rows["size"] == size])
    return told[told["family"].isin(list(schemes))]


def _said(classes: pd.DataFrame, schemes: tuple[str, ...]) -> str:
    """Return which classes are missed more than their share of steps."""
    more = classes[(classes["lift"] >= MORE) & (classes["num_misses"] >= ENOUGH)]
    parts = [
        f"{row['class']} by {row['family']} ({row['num_misses']} of {row['num_steps']} such steps, "
        f"{number(row['lift'])} times its share)"
        for _, row in more.sort_values(["lift", "family"], ascending=[False, True]).iterrows()
    ]
    told = "; ".join(parts) or "none"
    return (
        f"Missed at least {MORE:g} times their share of steps, and {ENOUGH} times or more, of what "
        f"{' and '.join(schemes)} cover: {told}."
    )


def _classes(classes: pd.DataFrame, size: int) -> HtmlTable:
    missed = classes[classes["num_misses"] > 0].sort_values(
        ["family", "num_misses", "class"], ascending=[True, False, True]
    )
    columns = (
        text_column("scheme"),
        text_column("class of the most likely token"),
        Column("missed", count),
        Column("of steps", count),
        Column("share of misses", percent),
        Column("lift", number),
    )
    names = ["family", "class", "num_misses", "num_steps", "miss_share", "lift"]
    caption = (
        f"Missed tokens by class at {count(size)} candidates, level local, all steps alike; classes "
        "without a miss are left out. Lift: share of misses over share of steps; above 1 is missed "
        "more. Counts, no interval."
    )
    rows = missed[names].itertuples(index=False, name=None)
    return build("table-miss-classes", caption, columns, rows)


def _listed(name: str, rows: pd.DataFrame, scheme: str, size: int) -> HtmlTable:
    shown = rows.head(MOST_SHOWN)
    columns = (
        text_column("missed token"),
        Column("its probability", lambda p: f"{p:.4f}"),
        text_column("class"),
        text_column("recorded token"),
        text_column("text before"),
        text_column("sequence"),
        Column("position", count),
    )
    told = [
        [
            *(_quoted(row["text"]), row["best_prob"], row["class"]),
            "the same" if row["best_id"] == row["token_id"] else _quoted(row["token_text"]),
            *(row["context"], row["sequence_id"], row["position"]),
        ]
        for _, row in shown.iterrows()
    ]
    caption = (
        f"The {len(shown)} most certain of {count(rows['num_misses'].iloc[0])} steps whose most "
        f"likely token {scheme} left out at {count(size)} candidates, level local."
    )
    return build(name, caption, columns, told)


def _quoted(text: str) -> str:
    """Return a token in brackets, which show the blanks around it."""
    return f"[{text}]"
