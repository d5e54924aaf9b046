"""``tracekit simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli.progress import Style

if TYPE_CHECKING:
    from tracekit.simulate.plan import Plan
    from tracekit.simulate.run import Simulated

_WHAT, _RUN = "What to replay", "Run"


def simulate(
    trace: Annotated[str, typer.Argument(help="Folder or URL of a trace.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder of the results.", rich_help_panel=_WHAT),
    ] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help="A KV policy: h2o, snapkv:window=16,at=context, h2o:kept=0.3,every=16+int4, quest; "
            "repeat it for several.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    vocab: Annotated[
        list[str] | None,
        typer.Option(
            help="A vocabulary estimator: frequency, lowrank:rank=64, frequency+previous; with what "
            "sets its size and what checks: previous@rate@fallback; repeat it for several.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    kept: Annotated[
        str,
        typer.Option(
            help="What policies keep that do not say it: 0.3, 512tok, 64MiB.",
            rich_help_panel=_WHAT,
        ),
    ] = "0.1,0.25,0.5,0.75",
    sizes: Annotated[
        str, typer.Option(help="Candidate-set sizes.", rich_help_panel=_WHAT)
    ] = "256,512,1024,2048,4096,8192",
    attention: Annotated[
        bool | None,
        typer.Option(
            help="Attention statistics and the kept fractions that they suggest.",
            rich_help_panel=_WHAT,
            show_default="where neither --kv nor --vocab is given",
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Which layers mind: prune one at a time inside the model, all others full.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="With --layers, what is done to a layer: rows:0.03 drops 3 % of each row's entries; "
            "or a policy, at each --kept if it says none; repeat it for several.",
            rich_help_panel=_WHAT,
            show_default="rows:0.03, h2o:kept=0.3,every=16 and snapkv:kept=0.3",
        ),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads", help="With --layers, each KV head alone as well.", rich_help_panel=_WHAT
        ),
    ] = False,
    fit_budget: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="With --layers, write a budget over layers for layers=heads_file,file=FILE.json, "
            "fitted on half of the sequences and tried on the others.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    fit_kept: Annotated[
        float,
        typer.Option(help="What that budget keeps of all layers.", rich_help_panel=_WHAT),
    ] = 0.3,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="SEQUENCE,LAYER,HEAD",
            help="Show which tokens each policy kept there at which step, and compute nothing else.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            help="local: the attention output of each layer, its inputs unchanged; predicted: KL "
            "foretold from influence probes; propagated: KL, perplexity and more from the model "
            "itself. Several with commas.",
            rich_help_panel=_WHAT,
        ),
    ] = "local",
    calibrate: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Run N sequences at all three levels, whatever --level says, and tell how far "
            "predicted and local can be trusted.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    probe_block: Annotated[
        int,
        typer.Option(
            help="Rows whose effects are added before they are squared (predicted).",
            rich_help_panel=_WHAT,
        ),
    ] = 16,
    convention: Annotated[
        str,
        typer.Option(
            help="How next-token distributions are compared and errors are made (propagated): "
            "tracekit, llama.cpp.",
            rich_help_panel=_WHAT,
        ),
    ] = "tracekit",
    model: Annotated[
        str | None,
        typer.Option(
            help="Where the trace's model is, if not where it was recorded.", rich_help_panel=_RUN
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where the model runs: auto, cpu, cuda.", rich_help_panel=_RUN)
    ] = "auto",
    kv_bytes: Annotated[
        int, typer.Option(help="Bytes of one number of the cache.", rich_help_panel=_WHAT)
    ] = 2,
    seed: Annotated[
        int, typer.Option(help="Of random policies and the bootstrap.", rich_help_panel=_RUN)
    ] = 0,
    bandwidths: Annotated[
        str | None,
        typer.Option(
            metavar="FAST,SLOW",
            help="GB/s of the fast tier and of the slow one, for the time that a step's reads take.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Processes that share the sequences.", rich_help_panel=_RUN)
    ] = 1,
    progress: Annotated[
        Style, typer.Option(help="How progress is shown on stderr.", rich_help_panel=_RUN)
    ] = Style.auto,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Replay eviction policies and candidate sets on a trace.

    Naming only --kv or only --vocab runs only that; naming neither runs a sensible set of both.
    Finished cells are found and not computed again.
    """
    from tracekit.cli.output import emit
    from tracekit.cli.progress import shown
    from tracekit.errors import CellsFailedError, InputError, UsageError
    from tracekit.simulate.layer_plan import make_sweep
    from tracekit.simulate.plan import Inside, make_plan
    from tracekit.simulate.run import simulate as run

    if not layers and (rule or heads or fit_budget):
        msg = "--rule, --heads and --fit-budget go with --layers: add it."
        raise UsageError(msg)
    amounts = kept.split(",")
    sweep = make_sweep(rule or (), kept=amounts, heads=heads, fit_to=fit_budget, fit_kept=fit_kept)
    plan = make_plan(
        kv or (None if not vocab else []),
        vocab or (None if not kv else []),
        kept=amounts,
        sizes=_sizes(sizes),
        attention=attention,
        sweep=sweep if layers else None,
        levels=level.split(","),
        seed=seed,
        bytes_per_number=kv_bytes,
        bandwidths=_bandwidths(bandwidths),
        probe_block=probe_block,
        inside=Inside(model=model, device=device, convention=convention),
        calibrate=calibrate,
    )
    if explain is not None:
        from tracekit.cli.explain import print_strips

        print_strips(trace, explain, plan, as_json=as_json)
        return
    if out is None:
        msg = "say where the results go: -o RESULTS."
        raise UsageError(msg)
    with shown(progress) as listener:
        done = run(trace, out, plan, jobs=jobs, progress=listener)
    found = done.num_computed + done.num_found
    if not found and done.skipped and not done.failed:
        msg = f"nothing of this applies to any sequence: {done.skipped[0]['why']}."
        raise InputError(msg)
    swept = _swept(done, as_json=as_json) if layers else ""
    emit(
        {
            "results": str(done.path),
            "num_computed": done.num_computed,
            "num_found": done.num_found,
            "skipped": list(done.skipped),
            "failed": list(done.failed),
            "fitted": done.fitted,
        },
        f"{swept}{done.path}: {done.num_computed} cells computed, {done.num_found} found, "
        f"{len(done.skipped)} not applicable."
        + (f" Next: {_next(plan, done.path)}" if found else ""),
        as_json=as_json,
    )
    if done.failed:
        msg = f"{len(done.failed)} cells failed (named above); the others are there."
        raise CellsFailedError(msg)


def _next(plan: Plan, path: Path) -> str:
    """Return the command that shows what was computed: layers have no report."""
    if plan.families or plan.schemes or plan.attention:
        return f"tracekit report {path} -o report.html"
    return f"tracekit show {path}"


def _swept(done: Simulated, *, as_json: bool) -> str:
    """Return the map of layers and rules as text."""
    from tracekit.cli.layers import layers_text
    from tracekit.schema import LAYER_SUMMARY

    if as_json:
        return ""
    import pyarrow.parquet as pq

    path = done.path / f"{LAYER_SUMMARY.name}.parquet"
    summary = pq.read_table(path).to_pydict() if path.exists() else {}
    return f"{layers_text(summary, done.fitted)}\n\n"


def _sizes(text: str) -> list[int]:
    """Return comma-separated numbers."""
    from tracekit.errors import UsageError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        msg = f"--sizes takes numbers with commas between them, not {text!r}."
        raise UsageError(msg) from None


def _bandwidths(text: str | None) -> tuple[float, float] | None:
    """Return bytes a second of two numbers of GB/s."""
    from tracekit.errors import UsageError

    if text is None:
        return None
    try:
        fast, slow = (1e9 * float(part) for part in text.split(","))
    except ValueError:
        msg = f"--bandwidths takes two numbers of GB/s, such as 2000,25, not {text!r}."
        raise UsageError(msg) from None
    return fast, slow
