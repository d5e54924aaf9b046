"""Which estimator keeps the most likely token for the least, in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit import schema
from tracekit.report.answers.answer import Answer
from tracekit.report.estimates import between
from tracekit.report.formats import count, percent
from tracekit.report.verdict.ranking import smallest
from tracekit.report.verdict.schemes import short_names
from tracekit.report.verdict.yardstick import DOMAIN_PROMPTS
from tracekit.simulate.scheme_name import scheme_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracekit.report.load import Point, Results

HIT_BOUND = 0.99
"""Share of steps whose most likely token must be a candidate, the interval included."""

_KEPT = "kept"
"""The one verdict of ``schema.VERDICTS`` that an estimator passes with."""


def vocab_answer(results: Results) -> Answer | None:
    """Return the cheapest estimator that keeps the most likely token; None without estimators."""
    judged = results.table(schema.VERDICTS)
    judged = judged[judged["domain"] == schema.ANY].sort_values("hit_level")
    if not judged.empty:
        short = short_names(results)
        sentences = [_judged(row, short) for row in judged.to_dict("records")]
        rule = (
            "Rule: the cheapest estimator and size that keep the most likely token, the interval "
            "included, for less than the full head on one half of the prompts; judged on the other "
            "half. Bounds are never named."
        )
    else:
        sentences = list(_cheapest(results))
        rule = (
            "Rule: the smallest measured size from which on the most likely token is a candidate in "
            f"at least {percent(HIT_BOUND, 0)} of steps, the interval included, on {DOMAIN_PROMPTS} "
            "sequences or more, least bytes first; chosen and judged on the same sequences. Bounds are "
            "never named."
        )
    if not sentences:
        return None
    return Answer(
        question="Which tokens need a logit?",
        verdict=sentences[0],
        findings=tuple(("And", sentence) for sentence in sentences[1:]),
        rule=rule,
    )


def _judged(row: Mapping[Any, Any], short: Mapping[str, str]) -> str:
    """Return the verdict of a row of ``schema.VERDICTS``, estimators by their short names."""
    level = f"{100 * row['hit_level']:g}\u00a0%"
    if row["verdict"] != _KEPT:
        return f"{level} of the most likely tokens: {row['why']}."
    ends = f" [{percent(row['low'])}, {percent(row['high'])}]" if not pd.isna(row["low"]) else ""
    text = scheme_name(row["estimator"], row["controller"])
    return (
        f"{level} of the most likely tokens are kept by {short.get(text, text)} at size "
        f"{count(row['size'])} for {percent(row['cost_frac'])} of the head's bytes: "
        f"{percent(row['hit_argmax'])}{ends} on {count(row['n'])} prompts that did not choose it, "
        f"{count(row['num_steps'])} steps, {count(row['set_size_mean'])} candidates in the mean."
        f"{_none_missed(row)}"
    )


def _none_missed(row: Mapping[Any, Any]) -> str:
    """Return what the lower end goes by where nothing was missed, for resamples then know nothing."""
    if row["hit_argmax"] < 1:
        return ""
    return (
        f" None was missed: the lower end is 1 \u2212 3 / {count(row['num_steps'])} steps, as if steps "
        "were independent."
    )


def _cheapest(results: Results) -> Iterator[str]:
    """Yield one sentence from the summary, where no halves of prompts were judged."""
    curves = results.methods("vocab", "hit_argmax")
    if not results.families("vocab"):
        return
    costs = results.means("vocab", "cost_frac")
    able = []
    for curve in curves.values():
        point = smallest(curve, _keeps)
        if point is not None and costs.get(point.cell, math.inf) < 1:
            able.append((costs[point.cell], point.family, point))
    hits = percent(HIT_BOUND, 0)
    most = max((point.n for curve in curves.values() for point in curve), default=0)
    if most < DOMAIN_PROMPTS:
        yield f"No verdict: {most} sequences, {DOMAIN_PROMPTS} needed."
        return
    if not able:
        yield f"No estimator keeps {hits} of the most likely tokens for less than the full head."
        return
    cost, family, point = min(able, key=lambda one: one[:2])
    yield (
        f"{family} reads the least: {count(point.x)} candidates hold the most likely token in "
        f"{percent(point.mean)} of steps {between(point, percent)}, for {percent(cost)} of the "
        f"head's bytes."
    )


def _keeps(point: Point) -> bool:
    """Return whether the lower end of the interval keeps enough; never without one."""
    return point.low >= HIT_BOUND and point.n >= DOMAIN_PROMPTS
