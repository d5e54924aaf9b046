"""What a verdict counts and resamples: prompts. Samples of one prompt are too alike to count apart."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tracekit.measure.stats import bootstrap_mean
from tracekit.report.load import KEY_MEASURES
from tracekit.schema import ANY

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Point, Results


def prompt_of(sequence_id: pd.Series[str]) -> pd.Series[str]:
    """Return the prompt, or text, of which each sequence is a sample, or a window."""
    return sequence_id.str.rsplit("#", n=1).str[0]


def prompts(results: Results, level: str) -> dict[str, int]:
    """Return how many prompts of each domain have results at a level; samples of one count once."""
    rows = results.whole
    rows = rows[rows["level"] == level]
    counts = prompt_of(rows["sequence_id"]).groupby(rows["domain"]).nunique()
    return {str(domain): int(number_of) for domain, number_of in counts.items()}


def most_prompts(results: Results, level: str) -> int:
    """Return on how many prompts the policy with most of them was measured at a level.

    Bounds and the full cache are left out, and prompts on which a policy evicted nothing.
    """
    rows = results.whole
    rows = _counted(rows[(rows["level"] == level) & rows["causal"].eq(True)])
    rows = rows[rows["family"] != "full"]
    counts = prompt_of(rows["sequence_id"]).groupby(rows["policy"]).nunique()
    return int(counts.max()) if len(counts) else 0


def by_prompt(
    results: Results, level: str, measure: str, policy: str, *, domain: str = ANY
) -> pd.Series[float]:
    """Return one measure of a policy on each prompt, sorted: the mean over its samples.

    Sequences in which nothing was evicted are left out, as in the summary.
    """
    rows = results.whole
    rows = _counted(rows[(rows["level"] == level) & (rows["policy"] == policy)])
    if domain != ANY:
        rows = rows[rows["domain"] == domain]
    values = rows[measure].astype(float).groupby(prompt_of(rows["sequence_id"]))
    found: pd.Series[float] = values.mean().dropna()
    return found


def over_prompts(results: Results, point: Point, *, domain: str = ANY) -> Point:
    """Return a point with mean, interval and n over prompts.

    Parameters
    ----------
    results
        Where it is from.
    point
        Its key measure at its level, over sequences. Where each prompt has one sequence, the two
        are the same, and the point is returned as it is.
    domain
        Of which the point is.
    """
    names = results.whole["sequence_id"].unique()
    if len({str(name).rsplit("#", 1)[0] for name in names}) == len(names):
        return point
    measure = KEY_MEASURES[point.level]
    values = by_prompt(results, point.level, measure, point.name, domain=domain)
    found = bootstrap_mean(values.to_numpy(), seed=results.run["seed"])
    mean, low, high = (
        math.nan if one is None else one for one in (found.mean, found.low, found.high)
    )
    return replace(point, mean=mean, low=low, high=high, n=found.n)


def _counted(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that count: something was evicted, or all entries were to be transformed."""
    return rows[~rows["is_idle"].eq(True) | (rows["target_frac"] >= 1)]
