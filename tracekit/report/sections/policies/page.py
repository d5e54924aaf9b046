"""Every policy at three kept fractions, each level of truth in columns of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Absent, Block, Heading, Section, Text
from tracekit.report.formats import percent
from tracekit.report.sections.policies.measured import COLUMNS, Measured
from tracekit.report.sections.policies.table import WANTED_FRACS, Policies
from tracekit.report.stacked import stacked

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options

_COMMAND = "tracekit simulate TRACE -o RESULTS --level local,predicted,propagated"


def section(results: Results, options: Options) -> Section | Absent:
    """Return the tables of policies."""
    del options
    if not any(level in results.levels for level in COLUMNS):
        return Absent(what="Policies: none was replayed", command=_COMMAND)
    table = Policies(Measured(results))
    blocks: list[Block] = [Text(text=table.legend, look="note")]
    for wanted in WANTED_FRACS:
        if points := table.near(wanted):
            blocks += [
                Heading(text=f"Asked to keep about {percent(wanted)}"),
                table.of(points, wanted),
            ]
    blocks += stacked(results)
    return Section(
        name="policies",
        title="Policies at three kept fractions",
        short="Policies",
        blocks=tuple(blocks),
    )
