"""The answer in sentences: numbers, intervals, n, and the stated rule that chose them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.report.formats import count, evidence, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tracekit.report.load import Point, Results

ERROR_BOUND = 0.10
"""Mean relative output error below which a kept fraction passes."""

HIT_BOUND = 0.99
"""Share of steps whose most likely token must be a candidate."""

DOMAIN_SEQUENCES = 8
"""Sequences of a domain below which nothing is said of it."""

_BOUND = percent(ERROR_BOUND)
_HITS = percent(HIT_BOUND, digits=0)
_NOT_PERPLEXITY = (
    "An error of one layer's attention output is not perplexity: each layer is judged with its "
    "inputs unchanged, and errors may add up or cancel."
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to one question.

    Parameters
    ----------
    question
        As a user asks it.
    verdict
        The answer in a sentence.
    findings
        Name of each policy or estimator and what was found of it, best first.
    rule
        What was counted, over what.
    cautions
        What the verdict does not say.
    """

    question: str
    verdict: str
    findings: tuple[tuple[str, str], ...]
    rule: str
    cautions: tuple[str, ...]


def kv_answer(results: Results) -> Answer:
    """Return which policy needs the smallest kept fraction, by the bound on output error."""
    curves = results.methods("kv", "output_error").values()
    passed = _passed(curves, _is_small)
    failed = sorted(_failed(curves, _is_small), key=lambda point: point.mean)
    findings = [(point.family, _kept(point)) for point in passed]
    findings += [(point.family, _not_kept(point)) for point in failed]
    return Answer(
        question="How little of the KV cache can be kept?",
        verdict=_kv_verdict(passed),
        findings=tuple(findings),
        rule=(
            f"Rule, at level {results.level}: the smallest measured kept fraction from which on "
            f"the mean relative error of the attention output stays below {_BOUND}; nothing is "
            "interpolated. In brackets: 95 % bootstrap interval over n sequences."
        ),
        cautions=(
            _NOT_PERPLEXITY,
            *_domain_sentences(results),
        ),
    )


def vocab_answer(results: Results) -> Answer:
    """Return which estimator reads the least, by the bound on the top token."""
    curves = results.methods("vocab", "hit_argmax").values()
    cost = results.means("vocab", "cost_frac")
    passed = sorted(_passed(curves, _is_hit), key=lambda point: cost.get(point.cell, math.inf))
    failed = sorted(_failed(curves, _is_hit), key=lambda point: -point.mean)
    findings = [(point.family, _covered(point, cost)) for point in passed]
    findings += [(point.family, _not_covered(point)) for point in failed]
    return Answer(
        question="Which tokens need a logit?",
        verdict=_vocab_verdict(passed, cost),
        findings=tuple(findings),
        rule=(
            "Rule: the smallest measured number of candidates from which on the most likely token "
            f"is among them in at least {_HITS} of steps, the interval included; least bytes read "
            "first. In brackets: 95 % bootstrap interval over n sequences. Bounds are left out, and "
            "what reads the full head's logits of earlier steps, which a decoder that prunes does "
            "not have."
        ),
        cautions=("A token that is no candidate cannot be sampled: see the probability covered.",),
    )


def _is_small(point: Point) -> bool:
    return point.mean < ERROR_BOUND


def _is_hit(point: Point) -> bool:
    return (point.mean if math.isnan(point.low) else point.low) >= HIT_BOUND


def _smallest(curve: list[Point], passes: Callable[[Point], bool]) -> Point | None:
    """Return the point of smallest x from which on all points of a curve pass; None if none does.

    Parameters
    ----------
    curve
        Ascending x.
    passes
        The rule.
    """
    smallest = None
    for point in reversed(curve):
        if not passes(point):
            break
        smallest = point
    return smallest


def _passed(curves: Iterable[list[Point]], passes: Callable[[Point], bool]) -> list[Point]:
    """Return the smallest passing point of each curve that has one, ascending x."""
    found = [_smallest(curve, passes) for curve in curves]
    return sorted((p for p in found if p is not None), key=lambda point: (point.x, point.family))


def _failed(curves: Iterable[list[Point]], passes: Callable[[Point], bool]) -> list[Point]:
    """Return the largest point of each curve that has no passing one."""
    return [curve[-1] for curve in curves if _smallest(curve, passes) is None]


def _kv_verdict(passed: list[Point]) -> str:
    if not passed:
        return f"No policy stays below {_BOUND} error at any measured kept fraction."
    best = passed[0]
    text = (
        f"{best.family} needs the least: with {percent(best.x)} of the cache the attention output "
        f"is off by {percent(best.mean)} ({_evidence(best)})."
    )
    if best.family == "random":
        return text + " That is chance: no other policy does better by this rule."
    by_chance = [point for point in passed if point.family == "random"]
    return text + "".join(f" Random eviction needs {percent(point.x)}." for point in by_chance)


def _vocab_verdict(passed: list[Point], cost: dict[tuple[str, str], float]) -> str:
    saving = [point for point in passed if cost.get(point.cell, math.inf) < 1]
    if not saving:
        return (
            f"No estimator holds the most likely token in {_HITS} of steps while reading less "
            "than the full head."
        )
    best = saving[0]
    return (
        f"{best.family} reads the least: {count(best.x)} candidates hold the most likely token in "
        f"{percent(best.mean)} of steps ({_evidence(best)}), and it {_cost(cost[best.cell])}."
    )


def _evidence(point: Point) -> str:
    return evidence(point.low, point.high, point.n)


def _beyond(point: Point) -> str:
    return "; the interval reaches beyond the bound" if point.high >= ERROR_BOUND else ""


def _kept(point: Point) -> str:
    return (
        f"{percent(point.x)} kept, error {percent(point.mean)} "
        f"({_evidence(point)}){_beyond(point)}."
    )


def _not_kept(point: Point) -> str:
    return (
        f"no measured fraction passes; with {percent(point.x)} kept, the most measured, the error "
        f"is {percent(point.mean)} ({_evidence(point)})."
    )


def _covered(point: Point, cost: dict[tuple[str, str], float]) -> str:
    return (
        f"{count(point.x)} candidates hold it in {percent(point.mean)} of steps "
        f"({_evidence(point)}); {_cost(cost.get(point.cell, math.nan))}."
    )


def _not_covered(point: Point) -> str:
    return (
        f"no measured size passes; {count(point.x)} candidates, the most measured, hold it in "
        f"{percent(point.mean)} of steps ({_evidence(point)})."
    )


def _cost(frac: float) -> str:
    if math.isnan(frac):
        return "its cost is not known"
    if frac >= 1:
        return "reads at least as much as the full head, so it saves nothing"
    return f"reads {percent(frac)} of the bytes of the full head"


def _domain_sentences(results: Results) -> list[str]:
    """Return what each domain needs, and how many domains are too small to say."""
    names = results.domains("kv")
    sentences = []
    for name in names:
        curves = results.methods("kv", "output_error", domain=name).values()
        if max((point.n for curve in curves for point in curve), default=0) < DOMAIN_SEQUENCES:
            continue
        passed = _passed(curves, _is_small)
        sentences.append(
            f"Domain {name}: {passed[0].family} needs the least, {percent(passed[0].x)}, error "
            f"{percent(passed[0].mean)} ({_evidence(passed[0])})."
            if passed
            else f"Domain {name}: no policy passes at any measured kept fraction."
        )
    if small := len(names) - len(sentences):
        sentences.append(
            f"No verdict for {small} of {len(names)} domains: fewer than {DOMAIN_SEQUENCES} "
            "sequences each."
        )
    return sentences
