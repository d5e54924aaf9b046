"""Claims about the cache: how much can go, by what score, and from what length on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.report.claims.claim import (
    Claim,
    Said,
    claim,
    untold,
    verdict_of,
)
from tracekit.report.estimates import between
from tracekit.report.formats import percent
from tracekit.report.verdict.compared import at_fraction, difference, least_loss
from tracekit.report.verdict.groups import group_difference
from tracekit.report.verdict.prompts import by_prompt, over_prompts, prompt_of, prompts
from tracekit.report.verdict.sides import all_of, any_of, is_below
from tracekit.report.verdict.yardstick import (
    CHANCE,
    COMPARED_FRAC,
    DOMAIN_PROMPTS,
    KEPT_TOLERANCE,
    RECENCY,
    evicts,
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


def _dropped(results: Results, yardstick: Yardstick, domain: str) -> Said:
    """Return whether the loss lies below the bound where at most ``KEPT_CLAIMED`` is held."""
    curves = results.methods("kv", yardstick.measure, level=yardstick.level, domain=domain)
    points = [
        over_prompts(results, point, domain=domain)
        for curve in curves.values()
        for point in curve
        if evicts(point) and point.x <= KEPT_CLAIMED + KEPT_TOLERANCE
    ]
    if not points:
        return untold(
            f"no policy was measured at {percent(KEPT_CLAIMED)} kept or less, "
            f"level {yardstick.level}"
        )
    able = [point for point in points if yardstick.judges(point)]
    if not able:
        most = max(point.n for point in points)
        return untold(f"{most} prompts at level {yardstick.level}, {DOMAIN_PROMPTS} needed")
    best = min(able, key=lambda point: (point.high, point.mean, point.family))
    side = any_of(is_below(point.low, point.high, yardstick.bound) for point in able)
    return Said(
        verdict_of(side),
        f"the best at {percent(KEPT_CLAIMED)} or less is {best.family} at {percent(best.x)}: "
        f"{yardstick.told(best)}, level {yardstick.level}",
        str(best.n),
    )


_DROPPED = (
    f"of policies that evict and hold {percent(KEPT_CLAIMED)} or less (within "
    f"{percent(KEPT_TOLERANCE)}), on {DOMAIN_PROMPTS} prompts or more: supported if the loss of one "
    "lies below the bound of the level with its interval, not supported if that of each lies above"
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
        f"{percent(KEPT_TOLERANCE)}), both paired intervals below 0; not supported if against one of "
        "the two every such policy has an interval above 0; the best is chosen and judged on the "
        f"same prompts, {DOMAIN_PROMPTS} or more"
    ),
)
def low_attention(results: Results, options: Options) -> Said:
    """Judge attention scores against chance and recency at equal fractions."""
    yardstick = judging(results, options)
    points = at_fraction(results, yardstick, COMPARED_FRAC) if yardstick else {}
    if yardstick is None or CHANCE not in points or RECENCY not in points:
        return untold(f"{CHANCE} and {RECENCY} were not both replayed")
    scored = [point for family, point in points.items() if _scores_attention(family)]
    says: list[str] = []
    sides: list[bool | None] = []
    ns: list[int] = []
    for family in (CHANCE, RECENCY):
        gains = _gains(results, yardstick, scored, points[family])
        if not gains:
            return untold(
                f"no policy that scores attention holds as little as {family}, on {DOMAIN_PROMPTS} "
                "prompts or more"
            )
        sides.append(any_of(is_below(gain.low, gain.high) for _, gain in gains))
        point, gain = gains[0]
        ns.append(gain.n)
        says.append(f"{point.family} less {family}: {_write(gain, yardstick)}")
    side = False if False in sides else all_of(sides)
    return Said(verdict_of(side), f"{'; '.join(says)}, level {yardstick.level}", str(min(ns)))


def _scores_attention(family: str) -> bool:
    """Return whether a policy of this short name, settings aside, scores attention and no more."""
    return "+" not in family and family.partition(":")[0] in ATTENTION_SCORES


def _gains(
    results: Results, yardstick: Yardstick, points: list[Point], reference: Point
) -> list[tuple[Point, Interval]]:
    """Return the loss of each policy less that of the reference, the lowest upper end first."""
    fair = [point for point in points if point.x <= reference.x + KEPT_TOLERANCE]
    found = [(point, difference(results, yardstick, point, reference)) for point in fair]
    able = [one for one in found if one[1].n >= DOMAIN_PROMPTS]
    return sorted(able, key=lambda one: (one[1].high or 0.0, one[0].family))


def _write(found: Interval, yardstick: Yardstick) -> str:
    mean = 0.0 if found.mean is None else found.mean
    return f"{yardstick.write(mean)}{yardstick.unit} {between(found, yardstick.write)}"


@claim(
    "Eviction pays above 8\u00a0K tokens",
    rule=(
        f"the best policy that evicts, asked to keep {percent(COMPARED_FRAC)}: its loss on prompts of "
        f"16\u00a0K tokens and more less that on all others, {DOMAIN_PROMPTS} prompts or more of each; "
        "supported if the interval is below 0, not supported if above"
    ),
)
def pays_when_long(results: Results, options: Options) -> Said:
    """Judge by the longest bucket; there is nothing to say without long sequences."""
    yardstick = judging(results, options)
    longest = max((one["num_tokens"] for one in results.run["sequences"]), default=0)
    best = least_loss(results, yardstick, COMPARED_FRAC) if yardstick else None
    if yardstick is None or best is None or _LONG not in results.buckets("kv"):
        return untold(f"the longest sequence has {longest} tokens")
    losses = by_prompt(results, yardstick.level, yardstick.measure, best.name)
    rows = results.whole
    long = set(prompt_of(rows.loc[rows["bucket"] == _LONG, "sequence_id"]))
    is_long = losses.index.isin(long)
    sizes = int(is_long.sum()), int((~is_long).sum())
    if min(sizes) < DOMAIN_PROMPTS:
        return untold(
            f"{sizes[0]} long prompts and {sizes[1]} others, {DOMAIN_PROMPTS} needed of each"
        )
    groups = (losses[chosen].to_numpy() for chosen in (is_long, ~is_long))
    more = group_difference(*groups, seed=results.run["seed"])
    return Said(
        verdict_of(is_below(more.low, more.high)),
        f"{best.family}: {_write(more, yardstick)}, level {yardstick.level}",
        f"{sizes[0]}, {sizes[1]}",
    )


CACHE_CLAIMS: tuple[Claim, ...] = (
    seventy_percent,
    reasoning_intact,
    low_attention,
    pays_when_long,
)
