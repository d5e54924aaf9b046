"""Where the loss sits: in layers, in a domain, far from the eviction point, in needles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES, bootstrap_mean
from tracekit.report.diagnosis.rule import Finding, Rule, rule
from tracekit.report.estimates import between, short
from tracekit.report.formats import number, percent
from tracekit.report.verdict.compared import in_domains, least_loss
from tracekit.report.verdict.prompts import by_prompt, prompts
from tracekit.report.verdict.sides import is_above
from tracekit.report.verdict.yardstick import (
    COMPARED_FRAC,
    DOMAIN_PROMPTS,
    evicts,
    judging,
    yardsticks,
)

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

LAYERS_PART, LAYERS_SHARE = 0.10, 0.50
"""A tenth of the layers has so much of the squared error."""

DOMAIN_FACTOR = 2.0
"""Times that a domain's loss is above the median of the others."""

NEEDLE_BOUND = 0.90
"""Needle entries that are held."""


def _best(results: Results, options: Options, level: str) -> Point | None:
    """Return the evicting policy that loses least at a level, where about half was asked for."""
    there = (one for one in yardsticks(results, options) if one.level == level)
    yardstick = next(there, None)
    return least_loss(results, yardstick, COMPARED_FRAC) if yardstick else None


@rule(
    "The error sits in few layers",
    threshold=(
        f"{percent(LAYERS_PART)} of the layers have {percent(LAYERS_SHARE)} of the squared output "
        f"error or more, best policy asked to keep {percent(COMPARED_FRAC)}"
    ),
    cause="some layers spread their attention, and all have the same budget",
    remedy="budgets by layer (layers=pyramid, cake), or simulate --layers --fit-budget FILE.json",
    needs="errors by layer, level local (tracekit simulate --level local)",
)
def few_layers(results: Results, options: Options) -> Finding | None:
    """Measure the share of the worst layers."""
    best = _best(results, options, "local")
    if best is None:
        return None
    rows = results.kv
    rows = rows[
        (rows["level"] == "local")
        & (rows["policy"] == best.name)
        & (rows["layer"] != schema.ALL)
        & (rows["kv_head"] == schema.ALL)
        & ~rows["is_idle"].eq(True)
    ]
    if rows.empty:
        return None
    squares = (rows["output_error"].astype(float) ** 2).groupby(rows["layer"]).mean()
    most = max(1, round(LAYERS_PART * len(squares)))
    worst = squares.sort_values(ascending=False, kind="stable").head(most)
    share = float(worst.sum() / squares.sum()) if squares.sum() > 0 else 0.0
    named = ", ".join(map(str, sorted(worst.index)))
    return Finding(
        share >= LAYERS_SHARE,
        f"{best.family}: layers {named} of {len(squares)} have {percent(share)}, level local, "
        f"n\u00a0=\u00a0{best.n}",
    )


@rule(
    "One domain loses far more than the others",
    threshold=(
        f"lower end of a domain's interval above {number(DOMAIN_FACTOR)} times the median of the "
        f"others' means, domains of {DOMAIN_PROMPTS} prompts or more"
    ),
    cause="its text needs tokens that the score takes for unimportant",
    remedy="a budget of its own for such requests, or no eviction there",
    needs=f"two domains of {DOMAIN_PROMPTS} prompts or more",
)
def one_domain(results: Results, options: Options) -> Finding | None:
    """Measure the domain that loses most against the median of the others."""
    for yardstick in yardsticks(results, options):
        best = least_loss(results, yardstick, COMPARED_FRAC)
        large = [
            d for d, have in prompts(results, yardstick.level).items() if have >= DOMAIN_PROMPTS
        ]
        if best is None or len(large) < 2:
            continue
        found = in_domains(results, yardstick, best)
        found = {domain: point for domain, point in found.items() if domain in large}
        if len(found) < 2:
            continue
        worst = max(found, key=lambda domain: (found[domain].mean, domain))
        others = pd.Series([point.mean for domain, point in found.items() if domain != worst])
        return Finding(
            is_above(found[worst].low, found[worst].high, DOMAIN_FACTOR * float(others.median())),
            f"{best.family} in {worst}: {yardstick.told(found[worst])}; median of the other "
            f"{len(others)} domains {yardstick.write(others.median())}, level {yardstick.level}",
        )
    return None


@rule(
    "The loss grows the longer the model writes",
    threshold="KL in the last bucket of steps after the eviction point above the first, intervals apart",
    cause="what was evicted is needed later, or small errors feed on themselves",
    remedy="evict in steps (every=N) with a window, or recall (quest) for long answers",
    needs="level propagated (tracekit simulate --level propagated)",
)
def grows_with_distance(results: Results, options: Options) -> Finding | None:
    """Measure KL by distance from the eviction point."""
    best = _best(results, options, "propagated")
    rows = results.table(schema.LOGIT_STATS)
    if best is None:
        return None
    rows = rows[
        (rows["policy"] == best.name)
        & (rows["grouping"] == "distance")
        & (rows["statistic"] == "kl_mean")
        & rows["low"].notna()
    ]
    if len(rows) < 2:
        return None
    start = rows["group"].str.extract(r"(\d+)")[0].astype(int)
    near, *_, far = rows.loc[start.sort_values(kind="stable").index].to_dict("records")
    told = [
        f"{short(one['value'])} [{short(one['low'])}, {short(one['high'])}], n\u00a0=\u00a0{one['n']} "
        f"at steps {one['group']}"
        for one in (near, far)
    ]
    return Finding(
        is_above(far["low"] - near["high"], far["high"] - near["low"]),
        f"{best.family}: KL {told[0]}; {told[1]} (nats a token, level propagated)",
    )


@rule(
    "Needles are lost while the mean is fine",
    threshold=(
        "on prompts with a needle, the loss of a policy stays below the bound with its interval while "
        f"less than {percent(NEEDLE_BOUND)} of the needle's entries are held in the mean, "
        f"{MIN_SEQUENCES} such prompts or more"
    ),
    cause="a mean over tokens hides the few that need an early detail",
    remedy="choose by needle_kept and marked answers as well; protect spans, or a larger kept=",
    needs=(
        f"a policy that passes on {MIN_SEQUENCES} prompts with a marked needle at the level that "
        "judges (tracekit record --prompts core has some)"
    ),
)
def lost_needles(results: Results, options: Options) -> Finding | None:
    """Measure loss and needles of each policy on the same prompts."""
    yardstick = judging(results, options)
    if yardstick is None:
        return None
    level, measure, seed = yardstick.level, yardstick.measure, results.run["seed"]
    curves = results.methods("kv", measure, level=level).values()
    passing = []
    for point in (point for curve in curves for point in curve if evicts(point)):
        held = by_prompt(results, "local", "needle_kept", point.name)
        loss = by_prompt(results, level, measure, point.name)
        common = held.index.intersection(loss.index)
        found = bootstrap_mean(loss.loc[common].to_numpy(), seed=seed)
        if found.high is not None and found.high < yardstick.bound:
            passing.append((float(held.loc[common].mean()), point.name, point, found))
    if not passing:
        return None
    kept, _, worst, found = min(passing, key=lambda one: one[:2])
    mean = 0.0 if found.mean is None else found.mean
    return Finding(
        kept < NEEDLE_BOUND,
        f"on prompts with a needle {worst.family} asked {percent(worst.asked)} stays below the bound "
        f"({yardstick.name} {yardstick.write(mean)}{yardstick.unit} "
        f"{between(found, yardstick.write)}, level {level}) and holds {percent(kept)} of the needle "
        f"(level local, the same prompts); the lowest of {len(passing)} such points",
    )


LOSS_RULES: tuple[Rule, ...] = (
    few_layers,
    one_domain,
    grows_with_distance,
    lost_needles,
)
