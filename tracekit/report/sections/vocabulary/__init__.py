"""Which tokens need a logit: one part of the section a file, put together by ``page``."""

from tracekit.report.sections.vocabulary.page import section

__all__ = ["section"]
