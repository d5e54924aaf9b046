"""How little of the cache keeps the output, in sentences: numbers, intervals, n and level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.answers.answer import Answer
from tracekit.report.breaking import first_to_break
from tracekit.report.formats import percent
from tracekit.report.verdicts import CHANCE, LEVEL_SEQUENCES, RECENCY, evicts, judging, rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options
    from tracekit.report.verdicts import Ranking, Yardstick


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
    findings = [
        ("Below that", _below(ranked)),
        ("Chance and recency", _references(ranked)),
        ("Domains", first_to_break(results, chosen)),
    ]
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


def _rule(yardstick: Yardstick) -> str:
    local = (
        " An error of one layer's output, its inputs unchanged, is not perplexity: errors may add "
        "up or cancel."
        if yardstick.level == "local"
        else ""
    )
    return (
        f"Rule, at the highest level with {LEVEL_SEQUENCES} sequences or more, else the lowest, here "
        f"{yardstick.level}: the smallest measured kept fraction from which on the upper end of the 95\u00a0% interval "
        f"of the {yardstick.name} stays below {yardstick.write(yardstick.bound)}{yardstick.unit}. "
        "Nothing is interpolated; levels are never mixed; bounds are never named. In brackets: "
        f"bootstrap interval over n sequences.{local}"
    )


def _verdict(results: Results, ranked: Ranking) -> str:
    """Return the verdict: the policy that needs least, and of those that evict the one."""
    yardstick = ranked.yardstick
    on = f"On these prompts {results.spec.name}"
    if not ranked.passed and not ranked.failed:
        return "No policy that frees memory was replayed, so no kept fraction can be judged."
    if not ranked.passed:
        ends = [f" The nearest is {_at(point, yardstick)}." for point in ranked.failed[:1]]
        few = max((point.n for point in ranked.failed), default=0) < LEVEL_SEQUENCES
        why = (
            f" There are fewer than {LEVEL_SEQUENCES} sequences, so nothing can pass."
            if few
            else ""
        )
        return f"{on} keeps its output with no policy at any measured fraction.{''.join(ends)}{why}"
    best = ranked.passed[0]
    text = (
        f"{on} keeps its output at {percent(best.x)} of the cache with {best.family} "
        f"({yardstick.told(best)}, level {yardstick.level})."
    )
    if evicts(best):
        return text
    if ranked.evicting is None:
        return f"{text} That stores all entries in fewer bytes; no policy that evicts passes."
    return (
        f"{text} That stores all entries in fewer bytes. Of policies that evict, "
        f"{ranked.evicting.family} needs the least: {percent(ranked.evicting.x)} "
        f"({yardstick.told(ranked.evicting)})."
    )


def _at(point: Point, yardstick: Yardstick) -> str:
    return f"{point.family} at {percent(point.x)} ({yardstick.told(point)})"


def _recall(results: Results, yardstick: Yardstick) -> list[tuple[str, str]]:
    """Return what recall policies need to read; they free nothing. Empty without one."""
    curves = results.curves("kv", yardstick.measure, level=yardstick.level, x_name="read_frac")
    able = {family: curve for family, curve in curves.items() if curve[0].causal}
    if not able:
        return []
    passed = rank(able, yardstick).passed
    if not passed:
        return [("Reading less", "no policy of recall passes at any measured read fraction.")]
    best = passed[0]
    told = (
        f"{best.family} passes where a step reads {percent(best.x)} of the cache "
        f"({yardstick.told(best)}); it frees nothing."
    )
    return [("Reading less", told)]


def _least(ranked: Ranking) -> str:
    """Return the verdict of another level in one sentence."""
    if not ranked.passed:
        nearest = "".join(f"; the nearest is {_at(p, ranked.yardstick)}" for p in ranked.failed[:1])
        return f"no policy passes at any measured fraction{nearest}."
    named = dict.fromkeys(point for point in (ranked.passed[0], ranked.evicting) if point)
    passing = ", then of those that evict ".join(_at(point, ranked.yardstick) for point in named)
    return f"the least is needed by {passing}."


def _below(ranked: Ranking) -> str:
    """Return the largest fraction at which nothing passes, and the best policy there."""
    if ranked.broken is None:
        return "no smaller fraction was measured, so where it breaks is not known."
    yardstick = ranked.yardstick
    bound = f"against a bound of {yardstick.write(yardstick.bound)}"
    if not ranked.passed and not yardstick.passes(ranked.broken):
        return (
            f"of all points measured the least loss has {_at(ranked.broken, yardstick)}, {bound}."
        )
    return (
        f"at {percent(ranked.broken_frac)} of the cache or less no policy passes; the best there "
        f"is {_at(ranked.broken, yardstick)}, {bound}."
    )


def _references(ranked: Ranking) -> str:
    """Return where chance and recency pass: what a score must beat."""
    names = {CHANCE: "evicting at random", RECENCY: "keeping sinks and the newest tokens"}
    tried = {point.family for point in (*ranked.passed, *ranked.failed)}
    least = ranked.evicting
    parts = []
    for family, meaning in names.items():
        point = ranked.of(family)
        if family not in tried:
            parts.append(f"{family} was not run")
        elif point is None:
            parts.append(f"{meaning} ({family}) passes nowhere")
        else:
            alike = ", as little as any score" if point == least else ""
            parts.append(f"{meaning} ({family}) passes too, from {percent(point.x)}{alike}")
    return f"{'; '.join(parts)}."
