"""What pruning the head can gain: its share of a step, and what batches read.

Times are not told: they differ from run to run, and a page does not. ``tracekit show`` prints them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.formats import count, percent
from tracekit.report.sections.vocabulary.estimators import head_share, times
from tracekit.report.tables import Column, build, text_column
from tracekit.report.verdict.schemes import REFERENCES, with_family
from tracekit.schema import BATCH_UNIONS, HEAD_TIMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from tracekit.report.load import Results
    from tracekit.report.sections.vocabulary.named import Named
    from tracekit.report.tables import HtmlTable


def findings(results: Results, named: Named) -> Iterator[tuple[str, str]]:
    """Yield what was found of costs: what each is about, and what is said of it."""
    times_taken = results.table(HEAD_TIMES)
    if (share := head_share(results)) is not None:
        free = float(times_taken["ceiling_free"].iloc[0])
        yield (
            "Ceiling",
            (
                f"the head is {percent(share)} of the weight bytes that a step reads; were it free, a "
                f"step of one request would be at most {times(free)} as fast. The cache's bytes come on "
                "top and lower that as the context grows. What gathering rows takes on the machine of the "
                "run: tracekit show RESULTS --vocab NAME."
            ),
        )
    if named.dear:
        yield (
            "Reads no less",
            (
                f"{', '.join(named.dear)} read as much as the full head or more to name their "
                "candidates: whatever they cover, they save nothing as they are."
            ),
        )
    yield from _in_batches(results, named)


def _in_batches(results: Results, named: Named) -> Iterator[tuple[str, str]]:
    rows = _unions(results, named)
    if not named.methods or rows.empty:
        return
    best = rows[rows["family"] == named.methods[0]].sort_values("batch")
    if len(best) < 2:
        return
    first, last = best.iloc[0], best.iloc[-1]
    yield (
        "Batches",
        (
            f"requests decoded together read the union of their sets. {named.methods[0]} reads "
            f"{percent(first['cost_frac'])} of the head for {first['batch']} request and "
            f"{percent(last['cost_frac'])} for {last['batch']} at {count(named.size)} candidates each."
        ),
    )


def _unions(results: Results, named: Named) -> pd.DataFrame:
    rows = results.table(BATCH_UNIONS)
    told = with_family(results, rows[rows["size"] == named.size])
    return told[told["family"].isin(list(named.looks))]


def batches(results: Results, named: Named) -> HtmlTable | None:
    """Return what a batch reads for the union of its sets, batches across; None of none."""
    rows = _unions(results, named)
    if rows.empty:
        return None
    sizes = sorted(set(rows["batch"]))
    cells = rows.set_index(["family", "batch"])["cost_frac"]
    columns = (
        text_column("estimator"),
        *(Column(f"{one} request" + "s" * (one > 1), percent) for one in sizes),
    )
    told = [
        [name, *(cells.get((name, one)) for one in sizes)]
        for name in (*named.methods, *REFERENCES)
        if (rows["family"] == name).any()
    ]
    caption = (
        f"Bytes read by a batch for the union of its requests' sets of {count(named.size)} "
        "candidates, over those of the full head, which a batch reads once. Means over "
        f"{_span(rows['num_draws'])} batches drawn from {_span(rows['n'])} sequences, seed "
        f"{results.run['seed']}, level local. Above 100\u00a0% the full head is cheaper."
    )
    return build("table-batches", caption, columns, told)


def _span(values: pd.Series[int]) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"
