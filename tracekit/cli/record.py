"""``tracekit record``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekit.cli.progress import Style

if TYPE_CHECKING:
    from tracekit.model.load import LoadedModel
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import Recorded
    from tracekit.record.source import Source

_WHAT, _KEPT, _HOW, _RUN = "What is run", "What is kept", "How it is run", "Run"


def record(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m (built in), a folder, a .gguf file, or a hub id.",
            rich_help_panel=_WHAT,
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "-o", "--out", help="Folder of the trace, or a URL of one.", rich_help_panel=_WHAT
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts to answer: core (built in, the default), or a file: text lines, or JSONL "
            "with prompt, messages, text, context and question, or turns.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A text file, or a folder of them, scored as it is in place of prompts.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    conversations: Annotated[
        str | None,
        typer.Option(
            help="JSONL of messages with their replies, scored as they are in place of prompts.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Cut --text into windows of N tokens.", rich_help_panel=_WHAT),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from one window to the next; each token is scored once.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="The first N prompts, windows or conversations only.", rich_help_panel=_WHAT
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Answers to each prompt.", rich_help_panel=_WHAT)
    ] = 1,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="All through the chat template, or nothing; else all but JSONL's text field.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    special_tokens: Annotated[
        str,
        typer.Option(
            help="What spells a special token in user text: literal words, or parse it.",
            rich_help_panel=_WHAT,
        ),
    ] = "literal",
    capture: Annotated[
        str,
        typer.Option(
            help="steps: numbers only; hidden: also final hidden states and attention statistics; "
            "qkv: also queries, keys and values, for exact KV replay; influence: also probes, which "
            "foretell an eviction's harm to the output.",
            rich_help_panel=_KEPT,
        ),
    ] = "qkv",
    maps: Annotated[
        str,
        typer.Option(
            help="Layers whose attention is kept whole: 0,5,-1 or all.", rich_help_panel=_KEPT
        ),
    ] = "",
    attention_topk: Annotated[
        int,
        typer.Option(
            help="Keep the K largest entries of each attention row.", rich_help_panel=_KEPT
        ),
    ] = 0,
    hidden_layers: Annotated[
        str,
        typer.Option(
            help="Layers whose outgoing hidden states are kept, for the logit lens: 20,24-28,-2 or "
            "all.",
            rich_help_panel=_KEPT,
        ),
    ] = "",
    dtype_store: Annotated[
        str,
        typer.Option(
            help="native: bit for bit; float16 or bfloat16: smaller, moves some kept sets.",
            rich_help_panel=_KEPT,
        ),
    ] = "native",
    head: Annotated[
        str,
        typer.Option(
            help="store the language-model head, so that replay needs no model, or omit it.",
            rich_help_panel=_KEPT,
        ),
    ] = "store",
    store_oproj: Annotated[
        bool,
        typer.Option(
            "--store-oproj",
            help="Store the layers' output projections: errors are measured after them as well.",
            rich_help_panel=_KEPT,
        ),
    ] = False,
    probes: Annotated[
        int,
        typer.Option(
            help="Influence probes a row (--capture influence): more foretell more exactly.",
            rich_help_panel=_KEPT,
        ),
    ] = 8,
    probe_dtype: Annotated[
        str,
        typer.Option(
            help="Type of their gradients: bfloat16, float16 or float32.", rich_help_panel=_KEPT
        ),
    ] = "bfloat16",
    probe_layers: Annotated[
        str, typer.Option(help="Layers that have them: 0-29, 0,5,-1 or all.", rich_help_panel=_KEPT)
    ] = "all",
    probe_from: Annotated[
        str,
        typer.Option(
            help="First row that has them: context, prompt, turn, a number of tokens, a fraction; "
            "without a context the prompt's end, without a prompt half of the text.",
            rich_help_panel=_KEPT,
        ),
    ] = "context",
    probe_seed: Annotated[
        int, typer.Option(help="Of the probes' draws.", rich_help_panel=_KEPT)
    ] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="New tokens an answer, at most (0: the prompt alone); else what the prompt says, "
            "else 128.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_HOW)] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.", rich_help_panel=_HOW)] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.", rich_help_panel=_HOW)] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all tokens.", rich_help_panel=_HOW)] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="1 is none.", rich_help_panel=_HOW)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampler.", rich_help_panel=_HOW)] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Sequences that run together.", rich_help_panel=_HOW)
    ] = 1,
    prefill_chunk: Annotated[
        int,
        typer.Option(
            help="Tokens of a prompt that go through the model at once.", rich_help_panel=_HOW
        ),
    ] = 2048,
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
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Spread the model: auto, balanced, or JSON from module to device.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code that comes with the model.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Record nothing: say how many sequences, bytes and seconds it would be.",
            rich_help_panel=_RUN,
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
    """Run a model and record what cannot be derived later.

    The same command again goes on where it stopped.
    """
    from tracekit.cli.progress import shown
    from tracekit.cli.sources import parse_maps, source_of
    from tracekit.errors import UsageError
    from tracekit.record.layer_choice import parse_layers
    from tracekit.record.options import RecordOptions
    from tracekit.record.probe_options import ProbeOptions
    from tracekit.record.sampler import Sampler

    options = RecordOptions(
        capture=capture,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        prefill_chunk=prefill_chunk,
        sampler=Sampler(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        ),
        seed=seed,
        dtype_store=dtype_store,
        maps=parse_maps(maps),
        attention_topk=attention_topk,
        hidden_layers=parse_layers("--hidden-layers", hidden_layers) if hidden_layers else (),
        head=head,
        store_oproj=store_oproj,
        probes=ProbeOptions(
            number=probes,
            dtype=probe_dtype,
            layers=parse_layers("--probe-layers", probe_layers),
            start=probe_from,
            seed=probe_seed,
        ),
        overwrite=overwrite,
    )
    given = bool(text or conversations)
    if given and (max_new_tokens is not None or options.sampler != Sampler()):
        msg = (
            "--text and --conversations are scored as they are, nothing is drawn: leave out "
            "--max-new-tokens and the sampler's flags."
        )
        raise UsageError(msg)
    if out.startswith("memory://"):
        msg = "memory:// ends with this process; give -o a folder, or a store that stays."
        raise UsageError(msg)
    source = source_of(
        prompts=prompts,
        text=text,
        conversations=conversations,
        window=window,
        stride=stride,
        limit=limit,
        samples=samples,
        chat=chat,
        special_tokens=special_tokens,
    )
    with shown(progress) as listener:
        from tracekit.model.load import load_model

        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            say=listener.say,
        )
        if dry_run:
            _tell_estimate(loaded, source, options, as_json=as_json)
            return
        from tracekit.record.recorder import record as run

        done = run(loaded, source, out, options, progress=listener)
    _tell_recorded(done, capture, as_json=as_json)


def _tell_estimate(
    loaded: LoadedModel, source: Source, options: RecordOptions, *, as_json: bool
) -> None:
    from tracekit.cli.output import emit, table
    from tracekit.record.dry_run import estimate

    found = estimate(loaded, source, options)
    rows = [[name, f"{num_bytes / 1e6:.1f}"] for name, num_bytes in found.num_bytes.items()]
    total = sum(found.num_bytes.values()) / 1e6
    text = (
        f"{found.num_sequences} sequences, {found.num_prompt} tokens to read and at most "
        f"{found.num_new} to make: about {total:.1f} MB and {found.seconds:.0f} s.\n\n"
        + table("bytes by file", ["file", "MB"], rows)
    )
    emit(found.to_json(), text, as_json=as_json)


_NEXT = {
    "steps": "show {}",
    "hidden": "simulate {} -o RESULTS --vocab previous",
    "qkv": "simulate {} -o RESULTS",
    "influence": "simulate {} -o RESULTS --level predicted",
}
"""What can be done with a trace of a capture level."""


def _tell_recorded(done: Recorded, capture: str, *, as_json: bool) -> None:
    from tracekit.cli.output import emit
    from tracekit.errors import CellsFailedError

    data: dict[str, Any] = {
        "trace": done.path,
        "num_sequences": done.num_sequences,
        "num_new": done.num_new,
        "skipped": [{"prompt": one.prompt, "why": one.why} for one in done.skipped],
    }
    text = f"{done.path}: {done.num_sequences} sequences ({done.num_new} new)."
    if done.num_sequences:
        text += f" Next: tracekit {_NEXT[capture].format(done.path)}"
    emit(data, text, as_json=as_json)
    if done.skipped:
        rest = "the others are recorded" if done.num_sequences else "nothing is recorded"
        msg = f"{len(done.skipped)} were skipped or lack probes (named above); {rest}."
        raise CellsFailedError(msg)
