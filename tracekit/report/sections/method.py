"""How it was measured: what was recorded with what, what was planned, what the columns mean."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.report.blocks import Code, Details, Facts, Heading, Section, Text
from tracekit.report.formats import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracekit.report.load import Results
    from tracekit.report.options import Options
    from tracekit.schema import Column

LEVELS = {
    "local": (
        "the attention output of each layer over the kept keys, against the recorded one; exact, "
        "the layer's inputs unchanged"
    ),
    "predicted": "KL of the next-token distributions, foretold from recorded gradients; an estimate",
    "propagated": (
        "KL, perplexity and most likely tokens from the model itself, all layers at once, on the "
        "recorded tokens; exact"
    ),
    "generated": "what the model writes when the policy is live",
}
"""What is told at each level of truth."""

_DATES = (
    "; the command, its date, all of the host's name and what took how long are in run.json and "
    "timings.parquet, so that the same trace gives the same page"
)
_FLAGS = {"policies": "kv", "estimators": "vocab"}
_KV_DEFINED = (
    "target_frac kept_frac read_frac output_error mass_kept kv_bytes kl_nats kl_predicted_nats "
    "noise_kl_nats same_top_frac is_idle is_clipped"
)
_VOCAB_DEFINED = (
    "size set_size_mean hit_argmax hit_chosen mass neg_log_mass_nats nll_full nll_backoff cost_frac"
)


def section(results: Results, options: Options) -> Section:
    """Return the conditions of the measurement."""
    del options
    run = results.run
    defined = []
    if results.levels:
        defined += _columns(schema.KV_RESULTS.columns, _KV_DEFINED)
    if results.families("vocab"):
        defined += _columns(schema.VOCAB_RESULTS.columns, _VOCAB_DEFINED)
    return Section(
        name="method",
        title="How it was measured",
        short="Method",
        blocks=(
            Text(
                text=(
                    "The run was recorded once; every policy and estimator was then replayed on "
                    "the same recorded tokens. Sequences in which nothing was evicted are counted "
                    "as left out and not averaged. Intervals are 95\u00a0% bootstrap intervals "
                    f"over sequences (seed {run['seed']}), those of verdicts over prompts; below 3 there "
                    "are none."
                )
            ),
            Facts(facts=tuple((f"Level {one}", LEVELS[one]) for one in results.levels)),
            Facts(facts=tuple(_conditions(results))),
            *_planned("policies", run["plan"]["kv"]),
            *_planned("estimators", run["plan"]["vocab"]),
            Heading(text="What the columns mean"),
            Facts(facts=tuple(map(_definition, defined)), has_code_terms=True),
        ),
    )


def _conditions(results: Results) -> list[tuple[str, str]]:
    """Return what was recorded, on what, and replayed how."""
    run, spec = results.run, results.spec
    trace, plan = run["trace"], run["plan"]
    versions = f"; {_facts(trace['versions'])}" if "versions" in trace else ""
    bound = f", {spec.revision}" if spec.revision else ""
    return [
        (
            "Model",
            f"{spec.name}{bound}, {spec.model_type}, {spec.dtype}, attention {spec.attention}",
        ),
        ("Fingerprint", spec.fingerprint),
        ("Trace", f"run {trace['run_id']}, capture {trace['capture']}"),
        ("Generation", _facts(trace["sampler"])),
        ("Recorded on", _facts(_host(trace["host"])) + versions),
        ("Candidate sizes", ", ".join(map(count, plan["sizes"])) or "none"),
        ("Bytes a number", str(plan["kv_bytes"])),
        (
            "Replayed with",
            _facts(run["versions"]) + _DATES,
        ),
    ]


def _host(host: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a host is, its system by name alone: the rest tells of one machine."""
    return {
        name: str(value).split("-", 1)[0] if name == "system" else value
        for name, value in host.items()
    }


def _planned(what: str, texts: Sequence[str]) -> list[Details]:
    """Return what was planned, folded, one canonical text a line; nothing of nothing."""
    if not texts:
        return []
    caption = f"Planned {what}, one a line, as --{_FLAGS[what]} takes them"
    code = Code(name=f"plan-{what}", caption=caption, text="\n".join(texts))
    return [Details(summary=f"Plan: {len(texts)} {what}", blocks=(code,))]


def _facts(facts: Mapping[str, Any]) -> str:
    """Return a mapping as one line: ``temperature 0.7, top_p 0.9``; nested values as JSON."""
    return ", ".join(
        f"{name} {value if type(value) is str else json.dumps(value, ensure_ascii=False)}"
        for name, value in facts.items()
    )


def _columns(columns: tuple[Column, ...], names: str) -> list[Column]:
    """Return columns by name, in the order of the names."""
    by_name = {column.name: column for column in columns}
    return [by_name[name] for name in names.split()]


def _definition(column: Column) -> tuple[str, str]:
    unit = f" ({column.unit})" if column.unit else ""
    return column.name, f"{column.meaning}{unit}"
