"""How sure the model is, step by step: regimes, spread by domain, and along the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tracekit.measure.pooled_quantile import pooled_quantile
from tracekit.measure.stats import bootstrap_mean
from tracekit.report.blocks import Absent, Section, Text
from tracekit.report.estimates import ends, span
from tracekit.report.figures.entropy_histogram import histogram
from tracekit.report.figures.regimes import MOST_SEQUENCES, timeline
from tracekit.report.formats import NOTHING, count, number, percent, percent_range
from tracekit.report.tables import INTERVAL, Column, build, text_column
from tracekit.schema import ANY, SCORED

if TYPE_CHECKING:
    from tracekit.measure.stats import Interval
    from tracekit.report.load import Results
    from tracekit.report.options import Options
    from tracekit.report.tables import HtmlTable

SURE_NATS = 0.01
"""Below this a step is as good as certain."""
QUANTILE = 0.8

PAPER_SURE, PAPER_QUANTILE_NATS = 0.5, 0.672
""""Beyond the 80/20 rule" (arXiv 2506.01939): more than half of the steps are sure, percentile 80."""

_ENDS = (1, 17, 65, 257, 1025)
"""First scored steps of the groups along a text."""


def section(results: Results, options: Options) -> Section | Absent:
    """Return the entropies of the scored steps."""
    del options
    steps = results.table(SCORED)
    steps = steps[steps["entropy_nats"].notna()]
    if steps.empty:
        return Absent(
            what="Entropy of each scored step, and its regimes",
            command="tracekit simulate TRACE -o RESULTS --vocab frequency",
        )
    seed = results.run["seed"]
    return Section(
        name="entropy",
        title="Entropy: how sure the model is",
        short="Entropy",
        blocks=(
            Text(text=_against_paper(steps, seed)),
            histogram(steps, QUANTILE),
            _by_domain(steps, seed),
            Text(text=_regimes(steps)),
            timeline(steps[steps["sequence_id"].isin(chosen(steps))]),
            _along(steps, seed),
        ),
    )


def chosen(steps: pd.DataFrame) -> list[str]:
    """Return the sequences whose entropy is drawn.

    They are the first sequence of the domains that have one of the most stretches of steady
    entropy, of domains that have as many in the order of their names.
    """
    most = steps.groupby(["domain", "sequence_id"], sort=True)["regime"].nunique().reset_index()
    first = most.sort_values(["regime", "domain", "sequence_id"], ascending=[False, True, True])
    names = first.drop_duplicates("domain")["sequence_id"].head(MOST_SEQUENCES)
    return [str(name) for name in names]


def _regimes(steps: pd.DataFrame) -> str:
    """Return how many sequences change their entropy for good, and how the drawn were chosen."""
    stretches = steps.groupby("sequence_id")["regime"].nunique()
    several = int((stretches > 1).sum())
    return (
        f"{several} of {len(stretches)} sequences have more than one stretch of steady entropy (two-"
        f"sided Page-Hinkley test, {count(stretches.sum())} stretches in all). Drawn is, of up to "
        f"{MOST_SEQUENCES} domains, the sequence that has the most."
    )


def _against_paper(steps: pd.DataFrame, seed: int) -> str:
    """Return what a published finding says, and what these steps say of it."""
    sure = _share(steps, seed)
    value, low, high = _quantile(steps, seed)
    agrees = (sure.mean or 0.0) > PAPER_SURE
    verdict = "These steps agree" if agrees else "These steps do not agree"
    return (
        "\u201cBeyond the 80/20 rule\u201d (arXiv 2506.01939) finds more than half of all tokens below "
        f"{SURE_NATS:g} nats and the 80th percentile at {PAPER_QUANTILE_NATS:g}. {verdict}: "
        f"{percent(sure.mean or 0.0)} lie below {SURE_NATS:g} ({_percents(sure)}), and the 80th "
        f"percentile is {number(value)} nats ({span(low, high, number)}; n\u00a0=\u00a0{sure.n} sequences, "
        f"{count(len(steps))} steps, raw logits at temperature 1, another model and other texts)."
    )


def _by_domain(steps: pd.DataFrame, seed: int) -> HtmlTable:
    columns = (
        text_column("domain"),
        Column("sequences", count),
        Column("steps", count),
        Column("mean (nats)", number),
        INTERVAL,
        Column(f"below {SURE_NATS:g} nats", percent),
        INTERVAL,
        Column("80th percentile (nats)", number),
        INTERVAL,
    )
    parts: list[tuple[str, pd.DataFrame]] = [(ANY, steps)]
    parts += [(str(name), part) for name, part in steps.groupby("domain", sort=True)]
    rows = []
    for name, part in parts:
        mean, sure, (value, low, high) = (
            _mean(part, seed),
            _share(part, seed),
            _quantile(part, seed),
        )
        told = [
            mean.mean,
            ends(mean, number),
            sure.mean,
            _percents(sure),
            value,
            span(low, high, number),
        ]
        rows.append([name, mean.n, len(part), *told])
    caption = (
        "Entropy of the scored steps by domain, all steps alike; intervals over sequences (95\u00a0% "
        f"bootstrap, seed {seed}; none below 3 sequences). Recorded, so at no level of truth."
    )
    return build("table-entropy", caption, columns, rows)


def _along(steps: pd.DataFrame, seed: int) -> HtmlTable:
    """Return entropy by the number of the scored step: whether texts get surer as they go on."""
    number_S = steps.groupby("sequence_id", sort=False).cumcount() + 1
    group_S = np.searchsorted(_ENDS, number_S, side="right") - 1
    rows = []
    for group, first in enumerate(_ENDS):
        part = steps[group_S == group]
        if part.empty:
            continue
        last = f"to {count(_ENDS[group + 1] - 1)}" if group + 1 < len(_ENDS) else "and later"
        mean = _mean(part, seed)
        rows.append([f"{count(first)} {last}", mean.n, len(part), mean.mean, ends(mean, number)])
    columns = (
        text_column("scored steps of a sequence"),
        Column("sequences", count),
        Column("steps", count),
        Column("mean entropy (nats)", number),
        INTERVAL,
    )
    caption = (
        "Entropy along the text: by the number of the scored step, all steps alike, intervals over "
        f"sequences (seed {seed}). Later rows are of longer sequences alone."
    )
    return build("table-entropy-along", caption, columns, rows)


def _mean(steps: pd.DataFrame, seed: int) -> Interval:
    return _over_sequences(steps["entropy_nats"], steps["sequence_id"], seed)


def _share(steps: pd.DataFrame, seed: int) -> Interval:
    """Return the share of steps that are as good as certain."""
    return _over_sequences(steps["entropy_nats"] < SURE_NATS, steps["sequence_id"], seed)


def _over_sequences(
    values: pd.Series[float] | pd.Series[bool], names: pd.Series[str], seed: int
) -> Interval:
    """Return a mean over all steps alike with its interval over sequences."""
    told = values.groupby(names).agg(["mean", "size"])
    return bootstrap_mean(told["mean"], seed=seed, weights=told["size"])


def _quantile(steps: pd.DataFrame, seed: int) -> tuple[float, float, float]:
    code_S = pd.factorize(steps["sequence_id"])[0]
    return pooled_quantile(steps["entropy_nats"].to_numpy(), code_S, QUANTILE, seed=seed)


def _percents(told: Interval) -> str:
    if told.low is None or told.high is None:
        return NOTHING
    return percent_range(told.low, told.high)
