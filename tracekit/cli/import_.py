"""``tracekit import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli.progress import Style

import_app = typer.Typer(
    help="Turn files of other tools into traces.", no_args_is_help=True, rich_markup_mode="rich"
)


@import_app.callback()
def formats() -> None:
    """Turn files of other tools into traces."""


@import_app.command("kld")
def kld(
    file: Annotated[
        Path, typer.Argument(help="File of llama-perplexity --kl-divergence-base (.kld).")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="The model that wrote it, for its tokenizer and spec: a built-in name, a folder, a "
            ".gguf file, or a hub id."
        ),
    ],
    out: Annotated[str, typer.Option("-o", "--out", help="Folder or URL of the trace.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete a trace that is there.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code that comes with the model."),
    ] = False,
    progress: Annotated[Style, typer.Option(help="How progress is shown on stderr.")] = Style.auto,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Make a trace of the log-probabilities that llama.cpp's perplexity tool wrote.

    One sequence a chunk, capture level steps; the model is not run.

    The same command again goes on where it stopped.
    """
    from dataclasses import asdict

    from tracekit.cli.output import emit
    from tracekit.cli.progress import shown
    from tracekit.errors import CellsFailedError
    from tracekit.record.kld import import_kld

    with shown(progress) as listener:
        done = import_kld(
            file,
            model,
            out,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            progress=listener,
        )
    emit(
        asdict(done),
        f"{done.path}: {done.num_sequences} sequences ({done.num_new} new); {done.num_clamped} of "
        f"{done.num_entries} log-probabilities stand at the file's clamp. "
        f"Next: tracekit show {done.path}",
        as_json=as_json,
    )
    if done.num_missing:
        msg = (
            f"{file} is cut: it lacks {done.num_missing} of "
            f"{done.num_sequences + done.num_missing} chunks; the whole ones are imported."
        )
        raise CellsFailedError(msg)
