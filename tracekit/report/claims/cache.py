"""Claims about the cache: how much can go, by what score, and from what length on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.claims.claim import (
    REFUTED,
    SUPPORTED,
    UNTOLD,
    Claim,
    Said,
    claim,
    untold,
)
from tracekit.report.estimates import between
from tracekit.report.formats import percent
from tracekit.report.verdict.compared import at_fraction, difference, prompts
from tracekit.report.verdict.ranking import ranking
from tracekit.report.verdict.yardstick import (
    CHANCE,
    COMPARED_FRAC,
    DOMAIN_PROMPTS,
    KEPT_TOLERANCE,
    RECENCY,
    judging,
    yardsticks,
)

if TYPE_CHECKING:
    from tracekit.measure.stats import Interval
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options
    from tracekit.report.verdict.yardstick import Yardstick

KEPT_CLAIMED = 0.30
"""What is kept where about 70 % is dropped."""

ATTENTION_SCORES = ("adakv", "cake", "finch", "h2o", "observed", "pyramidkv", "snapkv", "tova")
"""Policies that judge a key by the attention that it received."""

REASONING = ("arithmetic", "math", "mathematics", "reasoning")
"""Domains of multi-step reasoning."""

_LONG = ">= 16k"
"""Length bucket that is surely above 8 K tokens."""

_FEW = f"fewer than {MIN_SEQUENCES} sequences"


def _dropped(results: Results, yardstick: Yardstick, domain: str) -> Said:
    """Return whether an evicting policy passes where at most ``KEPT_CLAIMED`` is held."""
    curves = results.methods("kv", yardstick.measure, level=yardstick.level, domain=domain)
    points = [
        point
        for curve in curves.values()
        for point in curve
        if not point.target >= 1 and point.x <= KEPT_CLAIMED + KEPT_TOLERANCE
    ]
    if not points:
        return untold(
            f"no policy was measured at {percent(KEPT_CLAIMED)} kept or less, "
            f"level {yardstick.level}"
        )
    best = min(points, key=lambda point: (point.high, point.mean, point.family))
    if math.isnan(best.high):
        return untold(f"{_FEW} at level {yardstick.level}")
    return Said(
        SUPPORTED if yardstick.passes(best) else REFUTED,
        f"the best at {percent(KEPT_CLAIMED)} or less is {best.family} at {percent(best.x)}: "
        f"{yardstick.told(best)}, level {yardstick.level}",
        str(best.n),
    )


_DROPPED = (
    f"supported if a policy that evicts holds {percent(KEPT_CLAIMED)} or less (within "
    f"{percent(KEPT_TOLERANCE)}) and the interval ends below the bound of the level, not supported "
    "if one was measured there and none passes"
)


@claim("About 70\u00a0% of the cache can be dropped", rule=_DROPPED)
def seventy_percent(results: Results, options: Options) -> Said:
    """Judge the claim over all prompts."""
    yardstick = judging(results, options)
    if yardstick is None:
        return untold("no policy was replayed")
    return _dropped(results, yardstick, schema.ANY)


@claim(
    "... with reasoning intact",
    rule=f"the same in one domain of reasoning, with {DOMAIN_PROMPTS} prompts or more",
)
def reasoning_intact(results: Results, options: Options) -> Said:
    """Judge the claim on reasoning alone, at the highest level that has prompts enough."""
    most = 0
    for yardstick in yardsticks(results, options):
        have = prompts(results, yardstick.level)
        for domain in REASONING:
            most = max(most, have.get(domain, 0))
            if have.get(domain, 0) >= DOMAIN_PROMPTS:
                return _dropped(results, yardstick, domain)
    return untold(f"{most} prompts of reasoning, {DOMAIN_PROMPTS} needed")


@claim(
    "Tokens of low attention are the ones to drop",
    rule=(
        f"asked to keep {percent(COMPARED_FRAC)}: supported if some policy that scores attention "
        "loses less than chance, and some less than recency, at no larger kept fraction (within "
        f"{percent(KEPT_TOLERANCE)}), both paired intervals below 0; not supported if against one "
        "of the two every such policy has an interval above 0 or across it; the best is chosen and judged on the "
        "same sequences"
    ),
)
def low_attention(results: Results, options: Options) -> Said:
    """Judge attention scores against chance and recency at equal fractions."""
    yardstick = judging(results, options)
    points = at_fraction(results, yardstick, COMPARED_FRAC) if yardstick else {}
    if yardstick is None or CHANCE not in points or RECENCY not in points:
        return untold(f"{CHANCE} and {RECENCY} were not both replayed")
    scored = [point for family, point in points.items() if _scores_attention(family)]
    says, verdicts = [], []
    ns: list[int] = []
    for family in (CHANCE, RECENCY):
        best = _best_gain(results, yardstick, scored, points[family])
        if best is None:
            return untold(f"no policy that scores attention holds as little as {family}")
        point, gain = best
        verdicts.append(_less(gain))
        ns.append(gain.n)
        says.append(f"{point.family} less {family}: {_write(gain, yardstick)}")
    verdict = min(verdicts, key=(REFUTED, UNTOLD, SUPPORTED).index)
    return Said(verdict, f"{'; '.join(says)}, level {yardstick.level}", str(min(ns)))


def _scores_attention(family: str) -> bool:
    """Return whether a policy of this short name, settings aside, scores attention and no more."""
    return "+" not in family and family.partition(":")[0] in ATTENTION_SCORES


def _best_gain(
    results: Results, yardstick: Yardstick, points: list[Point], reference: Point
) -> tuple[Point, Interval] | None:
    """Return the policy whose loss less that of the reference has the lowest upper end."""
    fair = [point for point in points if point.x <= reference.x + KEPT_TOLERANCE]
    found = [(point, difference(results, yardstick, point, reference)) for point in fair]
    return min(
        found,
        key=lambda one: (math.inf if one[1].high is None else one[1].high, one[0].family),
        default=None,
    )


def _less(gain: Interval) -> str:
    """Return the verdict on 'this is below 0'; an interval across 0 does not support it."""
    if gain.high is None:
        return UNTOLD
    return SUPPORTED if gain.high < 0 else REFUTED


def _write(found: Interval, yardstick: Yardstick) -> str:
    mean = 0.0 if found.mean is None else found.mean
    return f"{yardstick.write(mean)}{yardstick.unit} {between(found, yardstick.write)}"


@claim(
    "Eviction pays above 8\u00a0K tokens",
    rule=(
        "the best policy needs a smaller kept fraction in the length bucket of 16\u00a0K tokens and "
        "more than in all together, both with intervals"
    ),
)
def pays_when_long(results: Results, options: Options) -> Said:
    """Judge by the longest bucket; there is nothing to say without long sequences."""
    yardstick = judging(results, options)
    longest = max((one["num_tokens"] for one in results.run["sequences"]), default=0)
    if yardstick is None or _LONG not in results.buckets("kv"):
        return untold(f"the longest sequence has {longest} tokens")
    needs = [ranking(results, yardstick, bucket=bucket).evicting for bucket in (_LONG, schema.ANY)]
    if any(point is None for point in needs):
        return untold("no policy passes there")
    long, everywhere = (point for point in needs if point is not None)
    return Said(
        SUPPORTED if long.x < everywhere.x else REFUTED,
        f"{percent(long.x)} there with {long.family}, {percent(everywhere.x)} over all with "
        f"{everywhere.family}, level {yardstick.level}",
        str(long.n),
    )


CACHE_CLAIMS: tuple[Claim, ...] = (
    seventy_percent,
    reasoning_intact,
    low_attention,
    pays_when_long,
)
