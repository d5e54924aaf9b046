"""Which sequences run together."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracekit.record.job import Job

LOOKAHEAD = 8
"""So many batches are drawn at once and sorted by length, so that little is padded."""


def batches(jobs: Iterable[Job], size: int) -> Iterator[list[Job]]:
    """Yield the jobs in batches, each job once.

    Parameters
    ----------
    jobs
        In the order in which they are wanted.
    size
        Most jobs of a batch; 1 keeps the order.

    Notes
    -----
    A job of several parts runs alone: its answers are fed back, and neighbours would end elsewhere.
    """
    jobs = iter(jobs)
    while group := list(islice(jobs, size * (LOOKAHEAD if size > 1 else 1))):
        yield from ([job] for job in group if len(job.parts) > 1)
        alike = [job for job in group if len(job.parts) == 1]
        if size > 1:
            alike.sort(key=lambda job: len(job.parts[0].ids))
        yield from (alike[start : start + size] for start in range(0, len(alike), size))
