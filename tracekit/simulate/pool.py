"""Sequences of one simulation on several processes, or on this one."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING

from tracekit.errors import UsageError
from tracekit.progress import Silent
from tracekit.simulate.results import Cells
from tracekit.simulate.work import Worker
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tracekit.progress import Progress
    from tracekit.simulate.plan import Plan
    from tracekit.simulate.work import Done

_WORKERS: list[Worker] = []
"""The one worker of a child process."""


def run_sequences(
    trace: Trace, out: Path, plan: Plan, sequence_ids: Sequence[str], jobs: int, progress: Progress
) -> Iterator[Done]:
    """Yield what each sequence gave, in order.

    Parameters
    ----------
    trace
        The trace.
    out
        Folder of the results.
    plan
        What to compute.
    sequence_ids
        Sequences.
    jobs
        Processes; 1: this one. They share the threads that torch has, so that more of them is
        faster where a sequence is too short to keep all threads at work.
    progress
        Told where the head comes from if the trace does not hold it.

    Raises
    ------
    UsageError
        If ``jobs`` is less than 1.
    """
    if jobs < 1:
        msg = f"jobs={jobs} is no number of processes, at least 1."
        raise UsageError(msg)
    if jobs == 1:
        worker = Worker(trace, Cells(out), plan, progress)
        for sequence_id in sequence_ids:
            yield worker.sequence(sequence_id)
        return
    import torch

    threads = max(1, torch.get_num_threads() // jobs)
    pool = ProcessPoolExecutor(
        max_workers=min(jobs, len(sequence_ids)),
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(str(trace.path), out, plan, threads),
    )
    with pool:
        with _deaf_children():
            done = pool.map(_sequence, sequence_ids)
        try:
            yield from done
        except BaseException:
            progress.say("stopping: the sequences in hand are finished first.")
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: this one stops them, their sequences finished.

    What is ignored stays so in a process that is started meanwhile. Threads other than the main one
    may not say what is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(trace: str, out: Path, plan: Plan, threads: int) -> None:
    """Make the worker of a child process."""
    import torch

    torch.set_num_threads(threads)
    _WORKERS.append(Worker(Trace(trace), Cells(out), plan, Silent()))


def _sequence(sequence_id: str) -> Done:
    return _WORKERS[0].sequence(sequence_id)
