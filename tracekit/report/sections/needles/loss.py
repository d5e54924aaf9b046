"""What the model loses on tokens of the needle, where policies were run inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.report.blocks import Absent, Heading, Text
from tracekit.report.estimates import span
from tracekit.report.formats import NOTHING, count, number, percent
from tracekit.report.tables import INTERVAL, Column, HtmlTable, build, text_column

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tracekit.report.blocks import Block
    from tracekit.report.load import Results

_INSIDE, _ELSEWHERE = "in the needle", "elsewhere"
"""Groups of ``schema.LOGIT_STATS`` by needle."""

Row = dict[str, Any]


def needle_loss(results: Results, with_needle: Collection[str], wanted_frac: float) -> list[Block]:
    """Return KL on needle tokens and elsewhere, level propagated, or what is missing for it.

    Parameters
    ----------
    results
        Of a simulation.
    with_needle
        Sequences that have a needle.
    wanted_frac
        Kept fraction near which each policy is taken.
    """
    pairs = _pairs(results, wanted_frac)
    if pairs:
        title = Heading(text="What the model loses on needle tokens")
        return [title, _table(pairs, results.run["seed"])]
    whole = results.whole
    ran = set(whole.loc[whole["level"] == "propagated", "sequence_id"])
    if ran & set(with_needle):
        text = "No step that was run inside the model has a token that stands in a needle too."
        return [Text(text=text, look="note")]
    return [
        Absent(
            what="What the model loses on needle tokens (level propagated)",
            command="tracekit simulate TRACE -o NEW_RESULTS --level propagated",
        )
    ]


def _pairs(results: Results, wanted_frac: float) -> list[tuple[Row, Row | None]]:
    """Return the means in the needle and elsewhere of one policy a family, least first."""
    stats = results.table(schema.LOGIT_STATS)
    of = (stats["grouping"] == "needle") & (stats["statistic"] == "kl_mean")
    rows: list[Row] = [
        {str(name): value for name, value in row.items()}
        for row in stats[of & (stats["convention"] == "tracekit")].to_dict("records")
    ]
    elsewhere = {row["policy"]: row for row in rows if row["group"] == _ELSEWHERE}
    nearest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda one: (abs(one["kept_frac"] - wanted_frac), one["policy"])):
        if row["group"] == _INSIDE:
            nearest.setdefault(row["family"], row)
    inside = sorted(nearest.values(), key=lambda one: (one["value"], one["family"]))
    return [(row, elsewhere.get(row["policy"])) for row in inside]


def _table(pairs: list[tuple[Row, Row | None]], seed: int) -> HtmlTable:
    columns = (
        text_column("policy"),
        Column("kept fraction", percent),
        Column("KL on needle tokens (nats)", number),
        INTERVAL,
        Column("n", count),
        Column("steps", count),
        Column("KL elsewhere (nats)", number),
        INTERVAL,
        Column("n", count),
        Column("steps", count),
    )
    rows = [
        (inside["family"], inside["kept_frac"], *_told(inside), *_told(elsewhere))
        for inside, elsewhere in pairs
    ]
    return build(
        "table-needle-loss",
        "Level propagated: KL a step between the next-token distributions under the full and the "
        "reduced cache, over steps whose token also stands in the needle (common words too), and "
        f"over all others. All steps count alike; 95\u00a0% bootstrap intervals over sequences "
        f"(seed {seed}; none below 3)",
        columns,
        rows,
    )


def _told(row: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return mean, interval, sequences and steps."""
    if row is None:
        return float("nan"), NOTHING, float("nan"), float("nan")
    interval = span(row["low"], row["high"], number)
    return row["value"], interval, row["n"], row["num_steps"]
