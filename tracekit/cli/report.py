"""``tracekit report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Argument(help="Folder of results.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The HTML file.")] = Path("report.html"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Write one HTML file that opens offline, and its figures and tables beside it."""
    from tracekit.cli.output import emit
    from tracekit.report.render import write_report

    path = write_report(results, out)
    emit({"report": str(path)}, str(path), as_json=as_json)
