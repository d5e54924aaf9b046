"""How little of the cache keeps the output, in sentences: numbers, intervals, n and level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.answers.answer import Answer
from tracekit.report.answers.certified import certified
from tracekit.report.formats import percent
from tracekit.report.verdict.breaking import first_to_break
from tracekit.report.verdict.prompts import by_prompt
from tracekit.report.verdict.ranking import ranking
from tracekit.report.verdict.yardstick import CHANCE, DOMAIN_PROMPTS, RECENCY, evicts, judging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options
    from tracekit.report.verdict.ranking import Ranking
    from tracekit.report.verdict.yardstick import Yardstick

_NONE_FREES = "No policy that frees memory was replayed"


def kv_answer(results: Results, options: Options, rankings: Sequence[Ranking]) -> Answer | None:
    """Return how little of the cache keeps the output, at the highest level that can say.

    Parameters
    ----------
    results, options
        What is judged, and the bound.
    rankings
        Of each level that has results; the others are told apart, after the verdict.

    Returns
    -------
    Answer or None
        None without a policy.
    """
    chosen = judging(results, options)
    if chosen is None:
        return None
    ranked = next(one for one in rankings if one.yardstick == chosen)
    findings = [("Held to other prompts", certified(results, options))]
    findings += _findings(results, ranked) if ranked.points else []
    findings += _recall(results, chosen)
    findings += [
        (f"Level {one.yardstick.level}, judged apart", _least(one))
        for one in rankings
        if one is not ranked
    ]
    return Answer(
        question="How little of the KV cache can be kept?",
        verdict=_verdict(results, ranked),
        findings=tuple(findings),
        rule=_rule(chosen),
    )


def _findings(results: Results, ranked: Ranking) -> list[tuple[str, str]]:
    """Return where it breaks, what chance and recency do, and which domain breaks first."""
    domains = ("Domains", first_to_break(results, ranked.yardstick))
    if ranked.is_thin:
        return [domains]
    if not ranked.passed:
        return [("Least loss", _closest(ranked)), domains]
    return [
        ("Below that", _below(ranked)),
        ("Chance and recency", _references(ranked)),
        domains,
    ]


def _rule(yardstick: Yardstick) -> str:
    local = (
        " An error of one layer's output, its inputs unchanged, is not perplexity: errors may add "
        "up or cancel."
        if yardstick.level == "local"
        else ""
    )
    return (
        f"Rule, at the highest level with {DOMAIN_PROMPTS} prompts or more (below that there are leads "
        f"and no verdict), here {yardstick.level}: the smallest measured kept fraction from which on "
        f"the upper end of the 95\u00a0% interval of the {yardstick.name} stays below "
        f"{yardstick.write(yardstick.bound)}{yardstick.unit}. The policy is chosen and judged on the "
        "same prompts. Nothing is interpolated; levels are never mixed; bounds are never named. In "
        f"brackets: bootstrap interval over n prompts, the samples of one averaged first.{local}"
    )


def _verdict(results: Results, ranked: Ranking) -> str:
    """Return the verdict: the policy that needs least, and of those that evict the one."""
    yardstick = ranked.yardstick
    on = f"On these prompts {results.spec.name}"
    if not ranked.points:
        return f"{_NONE_FREES}, so no kept fraction can be judged."
    if ranked.is_thin:
        return f"No verdict at level {yardstick.level}: {_thin(ranked)}. Record more prompts."
    if not ranked.passed:
        nearest = _at(ranked.failed[0], yardstick)
        return f"{on} keeps its output with no policy at any measured fraction. The nearest is {nearest}."
    best = ranked.passed[0]
    text = (
        f"{on} keeps its output at {percent(best.x)} of the cache with {best.family} "
        f"({yardstick.told(best)}, level {yardstick.level}); {_above(results, best, yardstick)}."
    )
    if evicts(best):
        return text
    if ranked.evicting is None:
        return f"{text} That stores all entries in fewer bytes; no policy that evicts passes."
    return (
        f"{text} That stores all entries in fewer bytes. Of policies that evict, "
        f"{ranked.evicting.family} needs the least: {percent(ranked.evicting.x)} "
        f"({yardstick.told(ranked.evicting)}); {_above(results, ranked.evicting, yardstick)}."
    )


def _above(results: Results, point: Point, yardstick: Yardstick) -> str:
    """Return how many prompts lie above the bound under a policy whose mean does not."""
    losses = by_prompt(results, yardstick.level, yardstick.measure, point.name)
    return (
        f"above the bound of {yardstick.write(yardstick.bound)}: "
        f"{int((losses > yardstick.bound).sum())} of {len(losses)} prompts"
    )


def _thin(ranked: Ranking) -> str:
    """Return how many prompts there are and are needed, and a lead."""
    most = max(point.n for point in ranked.points)
    lead = f"; as a lead, {_at(ranked.lead, ranked.yardstick)}" if ranked.lead else ""
    return f"{most} prompt{'s' * (most != 1)}, {DOMAIN_PROMPTS} needed{lead}"


def _at(point: Point, yardstick: Yardstick) -> str:
    return f"{point.family} at {percent(point.x)} ({yardstick.told(point)})"


def _recall(results: Results, yardstick: Yardstick) -> list[tuple[str, str]]:
    """Return what recall policies need to read; they free nothing. Empty without one."""
    ranked = ranking(results, yardstick, x_name="read_frac")
    if not ranked.points:
        return []
    told = "no policy of recall passes at any measured read fraction."
    if ranked.is_thin:
        told = f"no verdict: {_thin(ranked)}."
    elif ranked.passed:
        best = ranked.passed[0]
        told = (
            f"{best.family} passes where a step reads {percent(best.x)} of the cache "
            f"({yardstick.told(best)}); it frees nothing."
        )
    return [("Reading less", told)]


def _least(ranked: Ranking) -> str:
    """Return the verdict of another level in one sentence."""
    if not ranked.points:
        return f"{_NONE_FREES[0].lower()}{_NONE_FREES[1:]}."
    if ranked.is_thin:
        return f"no verdict: {_thin(ranked)}."
    if not ranked.passed:
        nearest = _at(ranked.failed[0], ranked.yardstick)
        return f"no policy passes at any measured fraction; the nearest is {nearest}."
    named = dict.fromkeys(point for point in (ranked.passed[0], ranked.evicting) if point)
    passing = ", then of those that evict ".join(_at(point, ranked.yardstick) for point in named)
    return f"the least is needed by {passing}."


def _below(ranked: Ranking) -> str:
    """Return the largest fraction at which nothing passes, and the best policy there."""
    if ranked.broken is None:
        return "no smaller fraction was measured, so where it breaks is not known."
    yardstick = ranked.yardstick
    return (
        f"at {percent(ranked.broken_frac)} of the cache or less no policy passes; the best there "
        f"is {_at(ranked.broken, yardstick)}, {_bound(yardstick)}."
    )


def _closest(ranked: Ranking) -> str:
    """Return the point that loses least, where nothing passes."""
    able = filter(ranked.yardstick.judges, ranked.points)
    least = min(able, key=lambda point: (point.mean, point.family))
    return f"of all points measured {_at(least, ranked.yardstick)}, {_bound(ranked.yardstick)}."


def _bound(yardstick: Yardstick) -> str:
    return f"against a bound of {yardstick.write(yardstick.bound)}"


def _references(ranked: Ranking) -> str:
    """Return where chance and recency pass: what a score must beat."""
    names = {CHANCE: "evicting at random", RECENCY: "keeping sinks and the newest tokens"}
    tried = {point.family: point.n for point in ranked.points}
    judged = {point.family for point in (*ranked.passed, *ranked.failed)}
    least = ranked.evicting
    parts = []
    for family, meaning in names.items():
        point = ranked.of(family)
        if family not in tried:
            parts.append(f"{family} was not run")
        elif family not in judged:
            parts.append(
                f"{family} is not judged: {tried[family]} prompts, {DOMAIN_PROMPTS} needed"
            )
        elif point is None:
            parts.append(f"{meaning} ({family}) passes nowhere")
        else:
            alike = ", as little as any score" if point == least else ""
            parts.append(f"{meaning} ({family}) passes too, from {percent(point.x)}{alike}")
    return f"{'; '.join(parts)}."
