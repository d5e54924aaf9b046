"""One section of the report a file: what it shows of the results, or what to run to get it.

A section is a function of results and options that returns a ``Section``, or ``Absent`` where
there is nothing to show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.sections import (
    answer,
    attention,
    cells,
    curves,
    diagnosis,
    domains,
    entropy,
    lengths,
    limits,
    maps,
    memory,
    method,
    needles,
    policies,
    recommendation,
    recorded,
    tokens,
    vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.report.blocks import Absent, Section
    from tracekit.report.load import Results
    from tracekit.report.options import Options

ORDER: tuple[Callable[[Results, Options], Section | Absent], ...] = (
    answer.section,
    recommendation.section,
    policies.section,
    curves.section,
    maps.section,
    domains.section,
    lengths.section,
    attention.section,
    needles.section,
    vocabulary.section,
    entropy.section,
    tokens.section,
    memory.section,
    diagnosis.section,
    recorded.section,
    method.section,
    cells.section,
    limits.section,
)
"""The page from top to bottom."""
