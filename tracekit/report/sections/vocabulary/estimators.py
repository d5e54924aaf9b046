"""Estimators in numbers: at three sizes, by domain, and the tails of what they lose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit.measure.ceiling import ceiling
from tracekit.report.blocks import Text
from tracekit.report.estimates import span
from tracekit.report.formats import NOTHING, count, number, percent, percent_range, sample_sizes
from tracekit.report.sections.vocabulary.named import asked
from tracekit.report.tables import INTERVAL, Column, build, text_column
from tracekit.report.verdict.schemes import ORACLE, REFERENCES, with_family
from tracekit.schema import ANY, CANDIDATE_STATS, HEAD_TIMES

if TYPE_CHECKING:
    from tracekit.report.blocks import Block
    from tracekit.report.load import Results
    from tracekit.report.sections.vocabulary.named import Named
    from tracekit.report.tables import HtmlTable

_TOLD = ("mass", "neg_log_mass_nats", "cost_frac")
_MOST_COLUMNS = 7  # Estimators that the table of domains has room for.
_MEAN = "neg_log_mass_mean"
_PERCENTILES = {
    "max": "max",
    "p99.9": "99.9\u00a0%",
    "p99": "99\u00a0%",
    "p95": "95\u00a0%",
    "p90": "90\u00a0%",
    "median": "median",
}


def estimators(results: Results, named: Named) -> HtmlTable:
    """Return every estimator: coverage at three sizes, the rest at the middle one."""
    curves = results.curves("vocab", "hit_argmax")
    means = {one: results.means("vocab", one) for one in _TOLD}
    share = head_share(results)
    first, last = named.sizes[0], named.sizes[-1]
    points = {
        family: point
        for family, curve in curves.items()
        if (point := asked(curve, named.size)) is not None
    }
    rows = []
    for family, point in sorted(points.items(), key=lambda one: (-one[1].mean, one[0])):
        ends = [asked(curves[family], size) for size in (first, last)]
        small, large = (one.mean if one else math.nan for one in ends)
        told = [means[one].get(point.cell, math.nan) for one in _TOLD]
        hit = [point.mean, percent_range(point.low, point.high)]
        gain = ceiling_of(share, told[-1])
        rows.append([_with_kind(family, named), small, *hit, large, *told, gain])
    columns = (
        text_column("estimator"),
        Column(f"covered at {count(first)}", percent),
        Column(f"at {count(named.size)}", percent),
        INTERVAL,
        Column(f"at {count(last)}", percent),
        Column("m", percent),
        Column("-ln m (nats)", number),
        Column("bytes read", percent),
        Column("ceiling", times),
    )
    caption = (
        "Steps whose most likely token is a candidate, at three sizes; the other numbers at "
        f"{count(named.size)} candidates. m: their probability. Bytes read: "
        "of the full head's. Ceiling: how many times faster a whole step gets at most, by the bytes "
        "of the weights, one request at a time. Level local, means over sequences "
        f"({sample_sizes([point.n for point in points.values()] or [0])}), seed "
        f"{results.run['seed']}; intervals of the other means are in summary.parquet."
    )
    return build("table-estimators", caption, columns, rows)


def _with_kind(family: str, named: Named) -> str:
    """Return the name of an estimator, and what it is if no method that saves bytes."""
    if family in named.bounds or family == ORACLE:
        return f"{family} (bound)"
    return f"{family} (reads no less)" if family in named.dear else family


def by_domain(results: Results, named: Named) -> HtmlTable | None:
    """Return the share of steps with the top token covered, a column an estimator; None of none."""
    names, rows = named.methods[:_MOST_COLUMNS], results.summary
    of_domains = rows[
        (rows["question"] == "vocab")
        & (rows["measure"] == "hit_argmax")
        & (rows["bucket"] == ANY)
        & (rows["target"] == named.size)
        & rows["family"].isin(list(names))
    ]
    cells = of_domains.set_index(["domain", "family"])[["mean", "n"]].to_dict("index")
    domains = sorted(set(of_domains["domain"]) - {ANY})
    if not domains:
        return None
    told = []
    for domain in (ANY, *domains):
        found = [cells.get((domain, name)) for name in names]
        n = max(one["n"] for one in found if one)
        told.append([domain, n, *(one["mean"] if one else math.nan for one in found)])
    columns = (
        text_column("domain"),
        Column("n", count),
        *(Column(name, percent) for name in names),
    )
    caption = (
        f"Steps with the top token covered at {count(named.size)} candidates, by domain: means over "
        f"its n sequences, level local, the {len(names)} that cover most. A mean of "
        "few sequences says little of its domain; intervals (from 3 sequences on) are in summary.parquet."
    )
    return build("table-vocabulary-domains", caption, columns, told)


def percentiles(results: Results, named: Named) -> list[Block]:
    """Return the tails of -ln m of the named estimators in llama.cpp's order, and in words."""
    rows = results.table(CANDIDATE_STATS)
    rows = rows[(rows["grouping"] == ANY) & (rows["size"] == named.size)]
    rows = with_family(results, rows)
    cells = rows.set_index(["family", "statistic"]).sort_index()
    there = [name for name in (*named.methods, *REFERENCES) if (name, _MEAN) in cells.index]
    if not there:
        return []
    values = cells["value"].to_dict()
    means = rows[rows["statistic"] == _MEAN]
    told_of = {row["family"]: row for row in means.to_dict("records")}
    told = []
    for name in there:
        mean = told_of[name]
        points = [values.get((name, f"neg_log_mass_{one}"), math.nan) for one in _PERCENTILES]
        told.append([name, mean["value"], span(mean["low"], mean["high"], _nats), *points])
    columns = (
        text_column("estimator"),
        Column("mean", _nats),
        INTERVAL,
        *(Column(label, _nats) for label in _PERCENTILES.values()),
    )
    caption = (
        f"-ln m in nats at {count(named.size)} candidates, {count(means['num_steps'].max())} steps "
        f"alike, {sample_sizes(means['n'])} sequences, level local, seed "
        f"{results.run['seed']}: the mean, and percentiles of steps in the order of llama.cpp; "
        "intervals of percentiles that have one are in candidate_stats.parquet."
    )
    first = there[0]
    usual, worst = (values.get((first, f"neg_log_mass_{one}"), math.nan) for one in ("p99", "max"))
    said = (
        f"{first} loses {_nats(worst)} nats at its worst step, and less than {_nats(usual)} at 99\u00a0% "
        f"of its {count(told_of[first]['num_steps'])} steps ({count(named.size)} candidates, "
        f"n\u00a0=\u00a0{told_of[first]['n']}, level local)."
    )
    return [Text(text=said), build("table-mass-tails", caption, columns, told)]


def _nats(value: float) -> str:
    return "infinite" if math.isinf(value) else number(value)


def head_share(results: Results) -> float | None:
    """Return the head's part of the weight bytes that a step reads, if it is known."""
    shares = results.table(HEAD_TIMES)["head_share"].dropna()
    return None if shares.empty else float(shares.iloc[0])


def ceiling_of(share: float | None, cost_frac: float) -> float:
    """Return how many times faster a step gets at most; NaN where that is not known."""
    if share is None or share >= 1 or math.isnan(cost_frac):
        return math.nan
    return ceiling(share, cost_frac)


def times(value: float) -> str:
    """Return a factor: ``1.27 times``."""
    return NOTHING if math.isnan(value) else f"{value:.3g}\u00a0\u00d7"
