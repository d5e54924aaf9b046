"""Whether candidate sets keep the most likely tokens: the verdicts, over all and by domain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit.report.blocks import Items
from tracekit.report.formats import count, percent, percent_range
from tracekit.report.sections.vocabulary.estimators import ceiling_of, head_share, times
from tracekit.report.tables import INTERVAL, Column, build, text_column
from tracekit.report.verdict.schemes import short_names
from tracekit.schema import ANY, VERDICTS
from tracekit.simulate.scheme_name import scheme_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.report.load import Results
    from tracekit.report.tables import HtmlTable

_KEPT = "kept"
_FEW = "too few prompts"


def sentences(results: Results) -> Iterator[str]:
    """Yield the verdicts on all prompts together, a sentence each, the lowest level first."""
    rows, short, share = results.table(VERDICTS), short_names(results), head_share(results)
    for row in rows[rows["domain"] == ANY].sort_values("hit_level").to_dict("records"):
        level = f"{100 * row['hit_level']:g}\u00a0% of most likely tokens"
        if row["verdict"] != _KEPT:
            yield f"{level}: {row['why']}."
            continue
        name = short.get(text := scheme_name(row["estimator"], row["controller"]), text)
        gain = ceiling_of(share, row["cost_frac"])
        faster = "" if math.isnan(gain) else f", so that a step gets at most {times(gain)} as fast"
        yield (
            f"{level} are kept by {name} at "
            f"{count(row['size'])} candidates, which reads {percent(row['cost_frac'])} of the full "
            f"head{faster}: {percent(row['hit_argmax'])} of {count(row['num_steps'])} steps "
            f"({percent_range(row['low'], row['high'])}) of the {row['n']} prompts that judge; chosen on "
            f"{row['n_choosing']} others."
        )


def verdicts(results: Results) -> HtmlTable | None:
    """Return a row a domain and level that could be judged: what was chosen, and why; or None."""
    rows, short = results.table(VERDICTS), short_names(results)
    rows = rows[rows["verdict"] != _FEW]
    if rows.empty:
        return None
    columns = (
        text_column("domain"),
        Column("to be kept", lambda frac: f"{100 * frac:g}\u00a0%"),
        text_column("verdict"),
        text_column("chosen, or the best there is"),
        Column("size", count),
        Column("kept", percent),
        INTERVAL,
        Column("bytes read", percent),
        text_column("prompts"),
    )
    told = [
        [
            *(row["domain"], row["hit_level"], row["verdict"]),
            *(_scheme(short, row["estimator"], row["controller"]), row["size"]),
            *(row["hit_argmax"], percent_range(row["low"], row["high"]), row["cost_frac"]),
            f"{row['n_choosing']} + {row['n']}",
        ]
        for row in rows.to_dict("records")
    ]
    caption = (
        "Verdicts: the cheapest scheme that keeps so many of the most likely tokens, chosen on one "
        "half of the prompts and judged on the other (prompts: choosing + judging). Bytes read: of "
        f"the full head's. Level local, seed {results.run['seed']}."
    )
    return build("table-verdicts", caption, columns, told)


def reasons(results: Results) -> Items:
    """Return the verdicts that could be given in a sentence each."""
    rows = results.table(VERDICTS)
    rows = rows[rows["verdict"] != _FEW]
    return Items(
        items=tuple(
            (f"{row['domain']}, {100 * row['hit_level']:g}\u00a0%", row["why"])
            for row in rows.to_dict("records")
        )
    )


def few(results: Results) -> str:
    """Return which domains have too few prompts for a verdict, and how many; '' if none."""
    rows = results.table(VERDICTS)
    rows = rows[(rows["domain"] != ANY) & (rows["verdict"] == _FEW)]
    if rows.empty:
        return ""
    told = {
        row["domain"]: f"{row['domain']} {row['n_choosing']} + {row['n']}"
        for row in rows.to_dict("records")
    }
    return (
        "Too few prompts for a verdict of their own (choosing + judging): "
        f"{', '.join(told.values())}. Whether candidate sets suit stories, articles, dialogue and "
        "summaries but not translation, code and mathematics cannot be said of these."
    )


def _scheme(short: dict[str, str], estimator: str | None, controller: str | None) -> str | None:
    if not isinstance(estimator, str) or not isinstance(controller, str):
        return None  # nothing to judge
    text = scheme_name(estimator, controller)
    return short.get(text, text)
