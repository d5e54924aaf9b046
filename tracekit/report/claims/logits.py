"""Claims about logits and states: attention, entropy, length and domain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES, Interval, bootstrap_mean
from tracekit.report.claims.claim import (
    Claim,
    Said,
    claim,
    share,
    untold,
    verdict_of,
)
from tracekit.report.estimates import between
from tracekit.report.formats import percent
from tracekit.report.verdict.compared import least_loss
from tracekit.report.verdict.controllers import points, timed_gains
from tracekit.report.verdict.groups import group_difference
from tracekit.report.verdict.prompts import prompt_of
from tracekit.report.verdict.schemes import COMPARED_SIZE, best_scheme, of_scheme
from tracekit.report.verdict.sides import all_of, is_above
from tracekit.report.verdict.yardstick import COMPARED_FRAC, DOMAIN_PROMPTS, judging

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

SUITED = ("article", "dialogue", "story", "summary")
UNSUITED = ("arithmetic", "code", "math", "mathematics", "reasoning", "translation")
"""Kinds of text that pruning the vocabulary is said to suit, and not to suit."""


@claim(
    "Attention tells which token comes next",
    rule=(
        "mean over layers and heads: supported if the interval of the attention on the next token, "
        "where it stands in the context, is above that of an even spread; not supported if below"
    ),
)
def attention_foretells(results: Results, options: Options) -> Said:
    """Judge attention on the next token against chance."""
    del options
    rows = _attended(results)
    rows = rows[rows["context_first"].isna()]
    found = {str(row["measure"]): row for row in rows.to_dict("records")}
    names = ("next_mass", "chance_mass")
    if any(name not in found or math.isnan(found[name]["low"]) for name in names):
        return untold("attention on the next token has no interval (tracekit simulate --attention)")
    mass, even = (found[name] for name in names)
    copied = (
        f"; the copy is the most attended token in {percent(found['top_1_hit']['mean'])} of these steps"
        if "top_1_hit" in found
        else ""
    )
    says = f"{share(mass)} of the attention against {share(even)}, level {mass['level']}{copied}"
    return Said(_apart(mass, even), says, str(int(mass["n"])))


def _attended(results: Results) -> pd.DataFrame:
    """Return what attention says of next tokens, mean over layers and heads, of all domains."""
    rows = results.table(schema.ATTENDED_SUMMARY)
    over_heads = (rows["layer"] == schema.ALL) & (rows["head"] == schema.ALL)
    return rows[over_heads & (rows["domain"] == schema.ANY)]


def _apart(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> str:
    """Return the verdict on 'one is above the other': intervals that do not touch.

    Of two intervals that are not paired the ends of the difference are taken at their widest.
    """
    return verdict_of(is_above(one["low"] - other["high"], one["high"] - other["low"]))


_STATE = (
    f"sizes that follow the state, mean nearest {COMPARED_SIZE}, against the same sizes at other "
    "steps: supported if the paired interval of the share of steps whose most likely token is a "
    "candidate is above 0, not supported if below 0; sizes that never differ are no test"
)


def _controlled(results: Results, kind: str) -> Said:
    """Return whether sizes set by a controller beat the same sizes at other steps."""
    tried = [one for one in timed_gains(results) if one.controller.startswith(kind)]
    if not tried:
        return untold(f"no estimator ran with the controller {kind}")
    varied = [one for one in tried if one.is_varied]
    if not varied:
        names = ", ".join(one.name for one in tried)
        return untold(f"the sizes of {names} never differ between steps, which is no test")
    side = all_of(is_above(one.timing.low, one.timing.high) for one in varied)
    parts = [
        f"{one.name}: {points(one.timing.mean or 0)} points {between(one.timing, points)}"
        for one in varied
    ]
    says = f"{'; '.join(parts)}, {varied[0].size} candidates in the mean"
    return Said(verdict_of(side), says, str(min(one.timing.n for one in varied)))


@claim("Pruning should follow the rate of the entropy", rule=_STATE)
def entropy_rate(results: Results, options: Options) -> Said:
    """Judge the controllers that follow the rate of the entropy."""
    del options
    return _controlled(results, "rate")


@claim("The free energy should set the candidate budget", rule=_STATE)
def free_energy(results: Results, options: Options) -> Said:
    """Judge the controllers that follow the thermodynamic state."""
    del options
    return _controlled(results, "thermo")


@claim(
    "Long contexts make errors rise",
    rule=(
        f"the best policy that evicts, asked to keep {percent(COMPARED_FRAC)}, in the shortest and "
        f"the longest length bucket of {MIN_SEQUENCES} sequences or more: supported if the "
        "interval of the longest is above, not supported if below"
    ),
)
def errors_with_length(results: Results, options: Options) -> Said:
    """Judge loss by length bucket."""
    yardstick = judging(results, options)
    best = least_loss(results, yardstick, COMPARED_FRAC) if yardstick else None
    if yardstick is None or best is None:
        return untold("no policy that evicts was replayed")
    found: list[tuple[str, Point]] = []
    for bucket in results.buckets("kv"):
        curves = results.methods("kv", yardstick.measure, level=yardstick.level, bucket=bucket)
        same = [point for point in curves.get(best.family, []) if point.name == best.name]
        found += [(bucket, point) for point in same if not math.isnan(point.low)]
    if len(found) < 2:
        return untold(
            f"{len(found)} length buckets have {MIN_SEQUENCES} sequences at level {yardstick.level}"
        )
    (short_name, short), (long_name, long) = found[0], found[-1]
    verdict = _apart(vars(long), vars(short))
    says = (
        f"{best.family}: {yardstick.told(long)} at {long_name} tokens, {yardstick.told(short)} at "
        f"{short_name}, level {yardstick.level}"
    )
    return Said(verdict, says, str(min(short.n, long.n)))


@claim(
    "Long contexts make attention anchors drift",
    rule=(
        "mean over layers, drift over 16 rows in the shortest and the longest bucket of context "
        "with an interval: supported if that of the longest is above, not supported if below"
    ),
)
def anchors_drift(results: Results, options: Options) -> Said:
    """Judge the drift of the most attended keys by context length."""
    del options
    rows = _attended(results)
    rows = rows[(rows["measure"] == "drift_16") & rows["low"].notna()]
    rows = rows.sort_values("context_first")
    if len(rows) < 2:
        return untold("fewer than two buckets of context have an interval")
    near, *_, far = rows.to_dict("records")
    verdict = _apart(far, near)
    says = "; ".join(
        f"drift {share(one)} at {one['context_first']:.0f} to {one['context_last']:.0f} tokens"
        for one in (near, far)
    )
    return Said(verdict, f"{says}, level {far['level']}", str(int(min(near["n"], far["n"]))))


@claim(
    "Pruning logits suits stories, articles, dialogue and summaries, not translation, code and "
    "mathematics",
    rule=(
        f"the estimator with most hits at {COMPARED_SIZE} candidates for less than the full head, "
        f"{DOMAIN_PROMPTS} prompts or more in both groups: supported if the interval of the hits of "
        "the first less those of the second is above 0, not supported if below"
    ),
)
def suited_domains(results: Results, options: Options) -> Said:
    """Judge two groups of domains by the share of most likely tokens that are candidates."""
    del options
    best = best_scheme(results)
    if best is None:
        return untold("no estimator reads less than the full head")
    groups = [_hits(results, best, names) for names in (SUITED, UNSUITED)]
    sizes = [len(one) for one in groups]
    if min(sizes) < DOMAIN_PROMPTS:
        return untold(
            f"{sizes[0]} prompts of the first kind and {sizes[1]} of the second, "
            f"{DOMAIN_PROMPTS} needed of each"
        )
    seed = results.run["seed"]
    first, second = (bootstrap_mean(one.to_numpy(), seed=seed) for one in groups)
    more = group_difference(*(one.to_numpy() for one in groups), seed=seed)
    says = (
        f"{best.family} at {best.x:.0f} candidates: {_share(first)} in the first kind, "
        f"{_share(second)} in the second; {points(more.mean or 0)} points "
        f"[{points(more.low or 0)},\u00a0{points(more.high or 0)}]"
    )
    return Said(verdict_of(is_above(more.low, more.high)), says, f"{first.n}, {second.n}")


def _share(found: Interval) -> str:
    return f"{percent(math.nan if found.mean is None else found.mean)} {between(found, percent)}"


def _hits(results: Results, best: Point, domains: tuple[str, ...]) -> pd.Series[float]:
    """Return the hits of an estimator on each prompt of some domains, its samples together."""
    rows = results.table(schema.VOCAB_RESULTS)
    same = of_scheme(rows[rows["domain"].isin(domains)], best)
    hits = same["hit_argmax"].astype(float)
    found: pd.Series[float] = hits.groupby(prompt_of(same["sequence_id"])).mean().dropna()
    return found


LOGIT_CLAIMS: tuple[Claim, ...] = (
    attention_foretells,
    entropy_rate,
    free_energy,
    errors_with_length,
    anchors_drift,
    suited_domains,
)
