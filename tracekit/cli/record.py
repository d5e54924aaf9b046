"""``tracekit record``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli.progress import Style

_WHAT, _HOW, _RUN = "What to record", "How to generate", "Run"


def record(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m (built in), a folder, a .gguf file, or a hub id.",
            rich_help_panel=_WHAT,
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Folder of the trace.", rich_help_panel=_WHAT)
    ],
    prompts: Annotated[
        str,
        typer.Option(
            help="core (built in), or a file: text lines, or JSONL with prompt, messages, text, "
            "context and question, or turns.",
            rich_help_panel=_WHAT,
        ),
    ] = "core",
    capture: Annotated[
        str,
        typer.Option(
            help="steps: numbers only; hidden: also final hidden states and attention statistics; "
            "qkv: also queries, keys and values, for exact KV replay.",
            rich_help_panel=_WHAT,
        ),
    ] = "qkv",
    limit: Annotated[
        int | None, typer.Option(help="Record the first N prompts only.", rich_help_panel=_WHAT)
    ] = None,
    dtype_store: Annotated[
        str,
        typer.Option(
            help="native: bit for bit; float16 or bfloat16: smaller, moves some kept sets.",
            rich_help_panel=_WHAT,
        ),
    ] = "native",
    head: Annotated[
        str,
        typer.Option(
            help="store the language-model head, so that replay needs no model, or omit it.",
            rich_help_panel=_WHAT,
        ),
    ] = "store",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="New tokens an answer, at most; else what the prompt says, else 128.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_HOW)] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.", rich_help_panel=_HOW)] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.", rich_help_panel=_HOW)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampler.", rich_help_panel=_HOW)] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="Type to compute in: auto (as stored), float32, bfloat16, float16.",
            rich_help_panel=_HOW,
        ),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1 ...", rich_help_panel=_HOW)
    ] = "auto",
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code that comes with the model.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete a trace that is there.", rich_help_panel=_RUN),
    ] = False,
    progress: Annotated[
        Style, typer.Option(help="How progress is shown on stderr.", rich_help_panel=_RUN)
    ] = Style.auto,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Run a model on prompts and record what cannot be derived later.

    The same command again goes on where it stopped.
    """
    from tracekit.cli.output import emit
    from tracekit.cli.progress import shown
    from tracekit.errors import CellsFailedError
    from tracekit.record.generate import Sampler
    from tracekit.record.options import RecordOptions
    from tracekit.record.prompts import read_prompts
    from tracekit.record.recorder import record as run

    options = RecordOptions(
        capture=capture,
        max_new_tokens=max_new_tokens,
        limit=limit,
        sampler=Sampler(temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
        dtype_store=dtype_store,
        head=head,
        overwrite=overwrite,
    )
    file = read_prompts(prompts)
    with shown(progress) as listener:
        from tracekit.model.load import load_model

        loaded = load_model(
            model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, say=listener.say
        )
        done = run(loaded, file, out, options, progress=listener)
    skipped = [{"prompt": one.prompt, "why": one.why} for one in done.skipped]
    emit(
        {
            "trace": str(done.path),
            "num_sequences": done.num_sequences,
            "num_new": done.num_new,
            "skipped": skipped,
        },
        f"{done.path}: {done.num_sequences} sequences ({done.num_new} new)."
        + (f" Next: tracekit simulate {done.path} -o RESULTS" if done.num_sequences else ""),
        as_json=as_json,
    )
    if skipped:
        rest = "the others are recorded" if done.num_sequences else "nothing is recorded"
        msg = f"{len(skipped)} prompts were skipped (named above); {rest}."
        raise CellsFailedError(msg)
