"""``tracekit show``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from tracekit.trace.reader import Trace


def show(
    folder: Annotated[
        str,
        typer.Argument(help="Folder of a trace or of results, or URL of a trace."),
    ],
    sequence: Annotated[
        str | None, typer.Option(help="Show the steps of this sequence of a trace.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Show what this policy of results does to next tokens (level propagated), as "
            "llama.cpp's perplexity tool prints it: snapkv:kept=0.25."
        ),
    ] = None,
    vocab: Annotated[
        str | None,
        typer.Option(
            help="Show what the candidate sets of this scheme of results hold, miss and cost: "
            "previous@rate."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            help="Size of candidate sets at which estimators are compared; with --vocab, that is told in "
            "full."
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            help="With --policy or --vocab, which steps: a domain, 1-16, 2-4 nats ...; with --vocab "
            "also by what: domain, class, entropy ..."
        ),
    ] = "all",
    attended: Annotated[
        bool,
        typer.Option(
            help="Show how well the attention of results foretells the next token, by head, layer "
            "and domain, and how its anchors drift."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Show what a trace or a results folder holds."""
    from tracekit.cli.output import emit

    if policy is not None:
        from tracekit.cli.policy_stats import read_policy

        data, text = read_policy(Path(folder), policy, group)
    elif vocab is not None:
        from tracekit.cli.candidates import read_vocab

        data, text = read_vocab(Path(folder), vocab, size, group)
    elif attended:
        from tracekit.cli.attended import read_attended

        data, text = read_attended(Path(folder))
    elif (Path(folder) / "run.json").exists():
        from tracekit.cli.results import read_results

        data, text = read_results(Path(folder), size)
    else:
        from tracekit.trace.reader import Trace

        trace = Trace(folder)
        data, text = _trace(trace) if sequence is None else _sequence(trace, sequence)
    emit(data, text, as_json=as_json)


def _trace(trace: Trace) -> tuple[dict[str, Any], str]:
    from tracekit.cli.output import number, table

    spec, manifest = trace.spec, trace.manifest
    steps = trace.table("steps", columns=["sequence_id", "position", "entropy_nats"])
    frame = trace.sequences
    rows = []
    # Plain text has no prompt: all of it counts that its window scores.
    starts = frame["prompt_end"].fillna(frame["scored_from"])
    for (_, one), start in zip(frame.iterrows(), starts, strict=True):
        made = steps[
            (steps["sequence_id"].astype(str) == one["sequence_id"]) & (steps["position"] >= start)
        ]
        mean = float(made["entropy_nats"].mean())
        rows.append(
            {
                "sequence": one["sequence_id"],
                "domain": one["domain"],
                "prompt": int(start),
                "tokens": int(one["num_tokens"]),
                "finish": one["finish_reason"],
                "entropy_nats": None if mean != mean else mean,  # noqa: PLR0124 NaN
                "text": one["text"],
            }
        )
    kinds = ", ".join(
        f"{sum(layer.kind == kind for layer in spec.layers)} {kind}"
        for kind in dict.fromkeys(layer.kind for layer in spec.layers)
    )
    head = [
        (
            f"{trace.path}: {len(frame)} sequences, {int(frame['num_tokens'].sum())} tokens, "
            f"{trace.num_bytes / 1e6:.1f} MB, capture {trace.capture}, recorded {manifest['created']}"
        ),
        (
            f"{spec.name} ({spec.model_type}): layers {kinds}; vocabulary {spec.head.num_rows}; "
            f"{spec.dtype}; {spec.kv_numbers_per_token} KV numbers a token"
        ),
    ]
    if lost := int(steps["entropy_nats"].isna().sum()):
        head.append(f"{lost} steps have logits that are not finite: they are in no mean.")
    if trace.residual_layers:
        layers = ", ".join(map(str, trace.residual_layers))
        head.append(f"hidden states that leave layers {layers}")
    if probes := manifest["settings"].get("probes"):
        rows_probed = frame["num_tokens"] - 1 - frame["probed_from"]
        head.append(
            f"{probes['number']} influence probes of {int(rows_probed.sum())} rows in "
            f"{len(probes['layers'])} layers, {probes['dtype']}, from {probes['from']}"
        )
    lacking = frame[frame["unprobed"].notna()]
    head += [
        f"no probes of {sequence}: {why}"
        for sequence, why in zip(lacking["sequence_id"], lacking["unprobed"], strict=True)
    ]
    head += [f"skipped {prompt}: {why}" for prompt, why in manifest.get("skipped", [])]
    cells = [
        [
            row["sequence"],
            row["domain"],
            str(row["prompt"]),
            str(row["tokens"]),
            row["finish"],
            number(row["entropy_nats"]),
            _one_line(row["text"], 21),
        ]
        for row in rows
    ]
    columns = ["sequence", "domain", "prompt", "tokens", "finish", "entropy, nats", "answer"]
    text = "\n".join(head) + "\n\n" + table("", columns, cells)
    return {"trace": str(trace.path), "manifest": manifest, "sequences": rows}, text


def _sequence(trace: Trace, sequence_id: str) -> tuple[dict[str, Any], str]:
    from tracekit.cli.output import number, table

    steps = trace.table("steps", sequence_id=sequence_id)
    tokens = trace.table("tokens", sequence_id=sequence_id).set_index("position")
    texts = trace.vocabulary()["text"]
    columns = ["position", "token", "entropy", "surprisal", "rank", "support 95 %", "most likely"]
    cells = [
        [
            str(step["position"]),
            _one_line(texts[tokens["token_id"][step["position"]]], 16),
            number(float(step["entropy_nats"])),
            number(float(step["surprisal_nats"])),
            str(step["rank"]),
            str(step["effective_support_95"]),
            _one_line(_likely(texts, step["top_ids"]), 34),
        ]
        for _, step in steps.iterrows()
    ]
    data = {"sequence_id": sequence_id, "steps": json.loads(_records(steps))}
    return data, table(f"{sequence_id}, entropy and surprisal in nats", columns, cells)


def _likely(texts: pd.Series[Any], ids: Sequence[int]) -> str:
    """Return the most likely tokens; a row of logits without a distribution has none."""
    known = [f"[{texts[one]}]" for one in ids[:3] if one >= 0]
    return " ".join(known) or "(logits are not finite)"


def _records(frame: pd.DataFrame) -> str:
    return str(frame.to_json(orient="records"))


def _one_line(text: str, width: int) -> str:
    """Return text on one line, cut to a width in cells, control characters written out."""
    from rich.cells import cell_len, set_cell_size

    line = " ".join(str(text).split())
    line = "".join(one if one.isprintable() else f"<U+{ord(one):04X}>" for one in line)
    return line if cell_len(line) <= width else f"{set_cell_size(line, width - 3)}..."
