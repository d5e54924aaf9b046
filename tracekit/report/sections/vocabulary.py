"""To be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Absent

if TYPE_CHECKING:
    from tracekit.report.blocks import Section
    from tracekit.report.load import Results
    from tracekit.report.options import Options


def section(results: Results, options: Options) -> Section | Absent:
    """Return the section."""
    del results, options
    return Absent(what="vocabulary", command="tracekit simulate TRACE -o RESULTS")
