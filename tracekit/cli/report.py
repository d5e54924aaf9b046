"""``tracekit report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Argument(help="Folder of results.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The HTML file.")] = Path("report.html"),
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of the device that is planned for: 80GiB, 24GB."),
    ] = None,
    kl_bound: Annotated[
        float,
        typer.Option(
            help="Propagated KL, in nats a token, above which a prompt counts as damaged."
        ),
    ] = 0.1,
    alpha: Annotated[
        float, typer.Option(help="Share of prompts that the recommended policy may damage.")
    ] = 0.1,
    delta: Annotated[
        float, typer.Option(help="Chance that the recommendation is wrong about that.")
    ] = 0.1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Write one HTML file that opens offline, and its figures and tables beside it."""
    from tracekit.cli.output import emit
    from tracekit.cli.sizes import parse_size
    from tracekit.report.options import Options
    from tracekit.report.render import write_report

    options = Options(
        memory_bytes=None if memory is None else parse_size(memory),
        kl_bound_nats=kl_bound,
        alpha=alpha,
        delta=delta,
    )
    path = write_report(results, out, options)
    emit({"report": str(path)}, str(path), as_json=as_json)
