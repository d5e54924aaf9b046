"""Claims that are often made, each held against these data by a stated rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Details
from tracekit.report.claims.cache import CACHE_CLAIMS
from tracekit.report.claims.claim import VERDICTS
from tracekit.report.claims.layers import LAYER_CLAIMS
from tracekit.report.claims.logits import LOGIT_CLAIMS
from tracekit.report.estimates import cell
from tracekit.report.tables import HtmlTable, text_column

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options

CLAIMS = (*CACHE_CLAIMS, *LAYER_CLAIMS, *LOGIT_CLAIMS)
"""In the order of the table."""


def claims_table(results: Results, options: Options) -> Details:
    """Return the table of claims, folded; its summary counts what was found."""
    said = [(one, one.test(results, options)) for one in CLAIMS]
    rows = tuple(
        (
            cell(one.claim),
            cell(found.verdict),
            cell(found.says),
            cell(found.n),
            cell(one.rule),
        )
        for one, found in said
    )
    counts = {verdict: sum(found.verdict == verdict for _, found in said) for verdict in VERDICTS}
    summary = ", ".join(f"{number_of} {verdict}" for verdict, number_of in counts.items())
    table = HtmlTable(
        name="answer-claims",
        caption=(
            "Claims under test; each verdict is that of its rule on these data alone. Supported: the "
            "95\u00a0% interval lies wholly on the side that the rule names; not supported: wholly on "
            "the other; else it cannot be told, which is no evidence of no difference"
        ),
        columns=tuple(map(text_column, ("claim", "verdict", "what these data say", "n", "rule"))),
        rows=rows,
    )
    return Details(summary=f"{len(said)} claims under test: {summary}", blocks=(table,))
