"""What a controller of the size gains over a fixed size of the same mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Text
from tracekit.report.estimates import ends
from tracekit.report.formats import count, percent
from tracekit.report.tables import INTERVAL, Column, build, text_column
from tracekit.report.verdict.controllers import controller_gains, points

if TYPE_CHECKING:
    from tracekit.measure.stats import Interval
    from tracekit.report.blocks import Block
    from tracekit.report.load import Results


def controllers(results: Results) -> list[Block]:
    """Return what each controller gains at each size, and in words; [] where none was tried."""
    found = list(controller_gains(results))
    if not found:
        return []
    columns = (
        text_column("scheme"),
        Column("mean size", count),
        Column("fixed size", percent),
        Column("fitted on others", percent),
        Column("same mean size", percent),
        Column("gain (points)", points),
        INTERVAL,
        Column("of it timing (points)", points),
        INTERVAL,
        Column("n", count),
    )
    caption = (
        "Most likely tokens covered by a size that a controller sets at each step, against the fixed "
        "size of the same mean on the same sequences, all steps alike, level local, seed "
        f"{results.run['seed']}. Fitted on others: "
        "sizes by what other prompts needed. Timing: against the same sizes at other steps. The sizes of the "
        "same mean are hindsight: no decoder has them."
    )
    rows = [
        [
            *(one.name, one.size, one.fixed, one.others, one.own),
            *(one.over_fixed.mean, ends(one.over_fixed, points)),
            *(one.timing.mean, ends(one.timing, points)),
            one.over_fixed.n,
        ]
        for one in found
    ]
    return [
        Text(text=_said([one.over_fixed for one in found])),
        build("table-controllers", caption, columns, rows),
    ]


def _said(gains: list[Interval]) -> str:
    """Return how often a controller is better or worse than chance allows."""
    known = [(one.low, one.high) for one in gains if one.low is not None and one.high is not None]
    better = sum(low > 0 for low, _ in known)
    worse = sum(high < 0 for _, high in known)
    if not known:
        return "Too few sequences to say whether a controller of the size gains anything."
    return (
        f"A size set at each step beats the fixed size of the same mean at {better} of {len(known)} "
        f"sizes and loses at {worse}, by intervals that leave 0 out; elsewhere no difference shows."
    )
