"""What pruning the head can gain: its share of a step, batches, and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.formats import count, number, percent
from tracekit.report.sections.vocabulary_estimators import head_share, times
from tracekit.report.sections.vocabulary_named import REFERENCES, with_family
from tracekit.report.tables import Column, build, text_column
from tracekit.schema import BATCH_UNIONS, HEAD_TIMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from tracekit.report.load import Results
    from tracekit.report.sections.vocabulary_named import Named
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
                "top and lower that as the context grows."
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
    at_one = times_taken[(times_taken["batch"] == 1) & (times_taken["size"] == named.size)]
    for row in at_one.to_dict("records"):
        yield (
            "Measured",
            (
                f"on the machine of the run {count(row['size'])} rows are gathered and multiplied in "
                f"{_ms(row['gather_s'] + row['multiply_s'])} ms, the full head in {_ms(row['full_s'])} ms (one "
                f"request, {row['dtype']}, {row['threads']} threads, medians of {row['rounds']} rounds); naming "
                "the candidates comes on top."
            ),
        )


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


def measured(results: Results) -> HtmlTable | None:
    """Return the clock's word: candidates gathered and multiplied against the full head."""
    rows = results.table(HEAD_TIMES)
    if rows.empty:
        return None
    columns = (
        Column("requests", count),
        Column("candidates each", count),
        Column("rows of the union", count),
        Column("gathering (ms)", str),
        Column("multiplying (ms)", str),
        Column("both, spread (ms)", str),
        Column("full head (ms)", str),
        Column("its spread (ms)", str),
        Column("both over full head", percent),
    )
    told = [
        [
            *(row["batch"], row["size"], row["gathered_rows"]),
            *map(
                _ms,
                (
                    row["gather_s"],
                    row["multiply_s"],
                    row["spread_s"],
                    row["full_s"],
                    row["full_spread_s"],
                ),
            ),
            (row["gather_s"] + row["multiply_s"]) / row["full_s"],
        ]
        for row in rows.to_dict("records")
    ]
    first = rows.iloc[0]
    caption = (
        f"Random candidates on the machine of the run: {first['dtype']}, {first['threads']} threads, "
        f"medians of {first['rounds']} rounds in turn, spread: interquartile range. The time to name "
        "the candidates is not in it."
    )
    return build("table-head-times", caption, columns, told)


def _span(values: pd.Series[int]) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def _ms(seconds: float) -> str:
    return number(1e3 * seconds)
