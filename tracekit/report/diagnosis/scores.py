"""Scores that are no better than none: chance, recency, a question that was seen, lost sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.diagnosis.rule import Finding, Rule, rule
from tracekit.report.estimates import between
from tracekit.report.formats import percent
from tracekit.report.verdict.compared import at_fraction, difference, nearest
from tracekit.report.verdict.prompts import by_prompt
from tracekit.report.verdict.sides import is_above
from tracekit.report.verdict.yardstick import (
    CHANCE,
    COMPARED_FRAC,
    KEPT_TOLERANCE,
    RECENCY,
    evicts,
    judging,
)

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options

EQUAL_SHARE = 0.10
"""Part of a reference's loss: a score that gains less over it does no better."""

QUESTION_FACTOR = 2.0
"""Times that a policy loses when it decides before the question."""

ASKED_TOLERANCE = 0.10
"""Asked fractions that differ by more from ``COMPARED_FRAC`` are not looked at for sinks."""

SINK_MASS = 0.30
"""Attention on the first keys from which they must not be evicted."""

SINK_LOST = 0.50
"""Lost attention over that mass from which sinks are likely among what was evicted."""


def _against(results: Results, options: Options, reference: str) -> Finding | None:
    """Return whether the best score at no larger kept fraction gains less than the margin."""
    yardstick = judging(results, options)
    points = at_fraction(results, yardstick, COMPARED_FRAC) if yardstick else {}
    if yardstick is None or reference not in points:
        return None
    own = points.pop(reference)
    fair = [
        point
        for family, point in points.items()
        if family not in (CHANCE, RECENCY) and point.x <= own.x + KEPT_TOLERANCE
    ]
    if not fair:
        return None
    best = min(fair, key=lambda point: (point.mean, point.family))
    gain = difference(results, yardstick, best, own)
    if gain.mean is None or gain.high is None:
        return None
    loss = by_prompt(results, yardstick.level, yardstick.measure, own.name).mean()
    margin = EQUAL_SHARE * float(loss)
    return Finding(
        is_above(gain.low, gain.high, -margin),
        f"{best.family} at {percent(best.x)} less {reference} at {percent(own.x)}: "
        f"{yardstick.write(gain.mean)}{yardstick.unit} {between(gain, yardstick.write)}, by "
        f"prompt, against \u2212{yardstick.write(margin)}, level {yardstick.level}",
    )


_OTHER = f"another policy at no larger fraction, {MIN_SEQUENCES} prompts or more"


def _as_well(reference: str) -> str:
    return (
        f"asked to keep {percent(COMPARED_FRAC)}, the score that loses least at no larger kept "
        f"fraction gains less than {percent(EQUAL_SHARE)} of the loss of {reference}, with the whole "
        "interval of the difference"
    )


@rule(
    "Keeping the newest tokens does as well as any score",
    threshold=_as_well(RECENCY),
    cause="these texts need only what is near",
    remedy=f"use {RECENCY}: it costs nothing; or test longer prompts with early details",
    needs=f"{RECENCY} and {_OTHER}",
)
def recency_suffices(results: Results, options: Options) -> Finding | None:
    """Measure the best score against recency."""
    return _against(results, options, RECENCY)


@rule(
    "Chance does as well as any score",
    threshold=_as_well(CHANCE),
    cause="the budget is generous, or the scores carry nothing",
    remedy="smaller kept fractions, or another score",
    needs=f"{CHANCE} and {_OTHER}",
)
def chance_suffices(results: Results, options: Options) -> Finding | None:
    """Measure the best score against chance."""
    return _against(results, options, CHANCE)


@rule(
    "The policy works only because it saw the question",
    threshold=(
        f"at=context loses more than at=prompt, interval above 0, and {QUESTION_FACTOR:g} times as "
        "much in the mean"
    ),
    cause="its score reads the last rows of the prompt, which are the question",
    remedy="judge by at=context where a cache serves several questions; a score without window",
    needs="the same policy at=context and at=prompt, on prompts with a marked context",
)
def saw_the_question(results: Results, options: Options) -> Finding | None:
    """Measure each policy before the question against after it."""
    yardstick = judging(results, options)
    if yardstick is None:
        return None
    curves = results.methods("kv", yardstick.measure, level=yardstick.level).values()
    points = {point.name: point for curve in curves for point in curve if evicts(point)}
    found = []
    for name, before in points.items():
        after = points.get(name.replace("at=context", "at=prompt"))
        if after is None or after is before:
            continue
        loss = difference(results, yardstick, before, after)
        if loss.mean is not None and loss.low is not None:
            is_twice = before.mean > QUESTION_FACTOR * after.mean
            found.append((is_twice and loss.low > 0, loss.low, before, after, loss))
    if not found:
        return None
    fires, _, before, after, loss = max(found, key=lambda one: (one[0], one[1], one[2].name))
    side = is_above(loss.low, loss.high)
    return Finding(
        fires if side else side,
        f"{before.family} asked {percent(before.asked)}: {yardstick.told(before)} before the "
        f"question, {yardstick.told(after)} after it; by prompt {yardstick.write(loss.mean or 0)} "
        f"{between(loss, yardstick.write)}, level {yardstick.level}, the clearest of {len(found)} pairs",
    )


@rule(
    "Attention sinks are evicted",
    threshold=(
        f"the first 4 keys have {percent(SINK_MASS)} of the attention or more, and a policy with "
        f"sinks=0, asked to keep {percent(COMPARED_FRAC)}, loses {percent(SINK_LOST)} of that mass"
    ),
    cause="the score does not know that the first keys hold spare attention",
    remedy="sinks=4",
    needs="attention statistics and a policy with sinks=0, level local (tracekit simulate --attention)",
)
def sinks_evicted(results: Results, options: Options) -> Finding | None:
    """Measure the mass that policies without protected sinks lose."""
    del options
    rows = results.table(schema.ATTENTION_RESULTS)
    rows = rows[(rows["kv_head"] == schema.ALL) & rows["first_4_mass"].notna()]
    curves = results.methods("kv", "mass_kept", level="local")
    points = [_bare(curve) for family, curve in curves.items() if family != CHANCE]
    bare = [point for point in points if point is not None]
    if rows.empty or not bare:
        return None
    sinks = float(rows.groupby("sequence_id")["first_4_mass"].mean().mean())
    worst = min(bare, key=lambda point: (point.mean, point.family))
    lost = 1 - worst.mean
    return Finding(
        sinks >= SINK_MASS and lost >= SINK_LOST * sinks,
        f"first 4 keys {percent(sinks)} of the attention, mean over layers, n\u00a0=\u00a0"
        f"{rows['sequence_id'].nunique()}; {worst.family} with sinks=0 loses {percent(lost)} of all "
        f"attention at {percent(worst.x)} kept (n\u00a0=\u00a0{worst.n}), level local",
    )


def _bare(curve: list[Point]) -> Point | None:
    """Return the point nearest half of a policy that protects no sinks; None otherwise."""
    point = nearest((point for point in curve if "sinks=0" in point.name), COMPARED_FRAC)
    if point is None or abs(point.asked - COMPARED_FRAC) > ASKED_TOLERANCE:
        return None
    return point


SCORE_RULES: tuple[Rule, ...] = (
    recency_suffices,
    chance_suffices,
    saw_the_question,
    sinks_evicted,
)
