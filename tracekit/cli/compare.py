"""``tracekit compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracekit.report.compare import Comparison
    from tracekit.report.compare.parts import Part

_FAIL_IF = (
    "Fail with exit code 6 where this holds in any cell; may be given often. \\[B.]MEASURE"
    "\\[.low|.high|.mean]\\[@NAME] OP NUMBER, OP one of > >= < <=. On the difference B - A, unless B. "
    "is before it: then on B's own mean. NAME is a policy or SCHEME:SIZE, whole or in part; "
    "bounds such as oracle are tested only where it means them. "
    "'kl>0.02', 'kl.high@snapkv:kept=0.25>0.02', 'hit@previous:1024<-0.01', 'B.kl>0.1'."
)

_MEASURE = (
    "Measures to show, with commas: output_error (error), kl_nats (kl), kl_predicted_nats, "
    "same_top_frac, nll_change (ppl: log perplexity), kept_frac (kept), read_frac, kv_bytes, "
    "hit_argmax (hit), hit_chosen, neg_log_mass_nats, cost_frac (cost), set_size_mean, layer_kl_nats, "
    "mean_entropy_nats (entropy), num_tokens ..."
)


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of results: the baseline.")],
    b: Annotated[Path, typer.Argument(help="Folder of results: what is new.")],
    policy: Annotated[
        str | None,
        typer.Option(help="Only this policy or scheme of B, whole or in part: snapkv:kept=0.25."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="The policy or scheme of A that --policy is held against."),
    ] = None,
    measure: Annotated[str | None, typer.Option(help=_MEASURE)] = None,
    fail_if: Annotated[list[str] | None, typer.Option("--fail-if", help=_FAIL_IF)] = None,
    level: Annotated[
        str | None, typer.Option(help="One level: local, predicted, propagated or generated.")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print tables for a pull request.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write it to this file instead.")
    ] = None,
) -> None:
    """Compare two results prompt by prompt, with intervals; --fail-if makes it a gate."""
    from tracekit.errors import UsageError
    from tracekit.report.compare import compare as compare_results

    if as_json and as_markdown:
        msg = "--json and --markdown are two outputs: give one of them."
        raise UsageError(msg)
    names = [one.strip() for one in (measure or "").split(",") if one.strip()]
    if measure is not None and not names:
        msg = "--measure names none; write one such as kl."
        raise UsageError(msg)
    made = compare_results(
        a,
        b,
        policy=policy,
        against=against,
        measures=names,
        level=level,
        conditions=fail_if or (),
    )
    _print(made, as_json=as_json, as_markdown=as_markdown, out=out)
    made.raise_if_failed()


def _print(made: Comparison, *, as_json: bool, as_markdown: bool, out: Path | None) -> None:
    """Print a comparison in one of its forms, or write it to a file."""
    from contextlib import redirect_stdout

    from tracekit.cli.output import emit
    from tracekit.errors import InputError
    from tracekit.report.compare.markdown import markdown
    from tracekit.report.compare.parts import parts

    data = made.to_json() if as_json else None
    text = "" if as_json else (markdown if as_markdown else _text)(parts(made))
    if out is None:
        emit(data, text.rstrip("\n"), as_json=as_json)
        return
    try:
        file = out.open("w", encoding="utf-8", errors="backslashreplace")
        with file, redirect_stdout(file):
            emit(data, text.rstrip("\n"), as_json=as_json)
    except OSError as error:
        msg = f"{out} cannot be written ({error.strerror}); give -o another file."
        raise InputError(msg) from error


def _text(made: Iterable[Part]) -> str:
    """Return parts as text that fits a terminal."""
    import textwrap

    from tracekit.cli.output import WIDTH, table
    from tracekit.report.formats import visible

    written = []
    for one in made:
        title = textwrap.fill(visible(one.title), WIDTH)
        lines = [textwrap.fill(visible(line), WIDTH) for line in one.lines]
        rows = [[visible(cell) for cell in row] for row in one.rows]
        body = [table("", one.columns, rows, gap=2).strip("\n")] if one.columns else []
        written.append("\n".join([title, *lines, *body]))
    return "\n\n".join(written)
