"""What was recorded: sequences by domain, and one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tracekit.report.blocks import Details, Section
from tracekit.report.formats import count, number
from tracekit.report.tables import Column, HtmlTable, build, text_column

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options


def section(results: Results, options: Options) -> Section:
    """Return the recorded sequences."""
    del options
    sequences = _sequences(results)
    return Section(
        name="recorded",
        title="What was recorded",
        short="Recorded",
        blocks=(
            _by_domain(results),
            Details(summary=f"All {len(sequences.rows)} sequences", blocks=(sequences,)),
        ),
    )


def _by_domain(results: Results) -> HtmlTable:
    frame = pd.DataFrame(results.run["sequences"])
    domains = frame.groupby("domain", as_index=False).agg(
        n=("sequence_id", "size"),
        tokens=("num_tokens", "sum"),
        scored=("num_scored", "sum"),
        entropy=("mean_entropy_nats", "mean"),
        sources=("text_source", lambda values: ", ".join(sorted(set(values)))),
    )
    columns = (
        text_column("domain"),
        Column("sequences", count),
        Column("tokens", count),
        Column("scored", count),
        Column("mean entropy (nats)", number),
        text_column("text"),
    )
    rows = domains.itertuples(index=False, name=None)
    return build("table-recorded", "Recorded sequences by domain", columns, rows)


def _sequences(results: Results) -> HtmlTable:
    columns = {
        "sequence_id": text_column("sequence"),
        "domain": text_column("domain"),
        "num_tokens": Column("tokens", count),
        "context_end": Column("context ends", count),
        "prompt_end": Column("prompt ends", count),
        "finish_reason": text_column("finished by"),
        "text_source": text_column("text"),
        "mean_entropy_nats": Column("mean entropy (nats)", number),
    }
    rows = [[row[name] for name in columns] for row in results.run["sequences"]]
    return build("table-sequences", "Recorded sequences", columns.values(), rows)
