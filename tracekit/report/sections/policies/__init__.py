"""Every policy at three kept fractions, put together by ``page``."""

from tracekit.report.sections.policies.page import section

__all__ = ["section"]
