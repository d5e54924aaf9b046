"""Two sets of results, or two policies of one, held against each other prompt by prompt."""

from __future__ import annotations

from tracekit.report.compare.compare import compare
from tracekit.report.compare.comparison import Comparison

__all__ = ["Comparison", "compare"]
