"""Results on disk become one HTML file with its figures beside it; needs neither torch nor model."""

from __future__ import annotations

from tracekit.report.render import write_report

__all__ = ["write_report"]
