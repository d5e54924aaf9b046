"""Early details of long texts: one part of the section a file, put together by ``page``."""

from tracekit.report.sections.needles.page import section

__all__ = ["section"]
