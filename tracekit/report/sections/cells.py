"""Cells that were skipped or failed, each with its reason: nothing is left out in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Block, Details, Section, Text
from tracekit.report.formats import NOTHING, count
from tracekit.report.tables import Column, HtmlTable, build, text_column

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options


def section(results: Results, options: Options) -> Section:
    """Return what has no result, and why."""
    del options
    failed, skipped = results.run["failed"], results.run["skipped"]
    blocks: list[Block] = []
    if failed:
        blocks.append(_failed(results))
    if skipped:
        title = f"{len(skipped)} skipped cells and the reasons"
        blocks.append(Details(summary=title, blocks=(_skipped(results),)))
    return Section(
        name="cells",
        title="Cells that were skipped or failed",
        short="Cells left out",
        blocks=tuple(blocks) or (Text(text="None: every planned cell has a result."),),
    )


def _failed(results: Results) -> HtmlTable:
    rows = [[row["cell"], row["why"]] for row in results.run["failed"]]
    return build("table-failed", "Failed", (text_column("cell"), text_column("why")), rows)


def _skipped(results: Results) -> HtmlTable:
    """Return the cells that do not apply; sequences of one reason together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in results.run["skipped"]:
        groups.setdefault((row["what"], row["why"]), []).append(row["sequence_id"] or NOTHING)
    columns = (text_column("what"), text_column("why"), Column("cells", count))
    rows = [[*key, len(names), ", ".join(names)] for key, names in groups.items()]
    return build(
        "table-skipped", "Skipped: does not apply", (*columns, text_column("sequences")), rows
    )
