"""``tracekit validate``."""

from __future__ import annotations

from typing import Annotated

import typer


def validate(
    trace: Annotated[str, typer.Argument(help="Folder or URL of a trace.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Check a trace wholly: schemas, checksums, counts, F = U - T S, ids, decoded text."""
    from tracekit.cli.output import emit
    from tracekit.errors import TraceError
    from tracekit.trace.validate import validate as run

    done = run(trace)
    lines = [f"{problem.where}: {problem.what}" for problem in done.problems]
    lines.append(
        f"{trace}: {done.num_shards} shards, {done.num_sequences} sequences, "
        f"{done.num_steps} steps, {done.num_nonfinite or 'none'} of them not finite; "
        f"{len(done.problems) or 'no'} problems"
    )
    emit(
        {
            "trace": str(trace),
            "num_shards": done.num_shards,
            "num_sequences": done.num_sequences,
            "num_steps": done.num_steps,
            "num_nonfinite": done.num_nonfinite,
            "problems": [{"where": one.where, "what": one.what} for one in done.problems],
        },
        "\n".join(lines),
        as_json=as_json,
    )
    if done.problems:
        msg = f"{trace} is not whole: {len(done.problems)} problems, listed above."
        raise TraceError(msg)
