"""What is to be written waits here: a queue bounded in bytes, emptied by one thread in order.

A slow disk fills the queue and then makes the recording wait; memory never grows. An error in the
thread stops the recording at its next step.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

OUTBOX_BYTES = 64 << 20
"""Most bytes that wait to be written; one larger piece waits alone."""


class Outbox:
    """A bounded queue of writes and the thread that does them, one after the other.

    A context manager: however it is left, what waits is written first, unless a write failed.

    Parameters
    ----------
    limit_bytes
        Most bytes that wait.
    """

    def __init__(self, limit_bytes: int = OUTBOX_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting_bytes = 0
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="tracekit-writer", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the writes, end the thread; raise what it met if nothing else was raised."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        if error is None:
            self.check()

    def put(self, write: Callable[[], None], num_bytes: int = 0) -> None:
        """Let a write wait its turn; wait oneself while the queue is full.

        Raises
        ------
        BaseException
            What an earlier write met.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_room(num_bytes))
            self._raise()
            self._waiting.append((write, num_bytes))
            self._waiting_bytes += num_bytes
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what a write met, if one failed."""
        with self._changed:
            self._raise()

    def flush(self) -> None:
        """Wait until everything is written, or raise what a write met."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or not (self._waiting or self._is_busy)
            )
            self._raise()

    def _has_room(self, num_bytes: int) -> bool:
        return not self._waiting_bytes or self._waiting_bytes + num_bytes <= self._limit_bytes

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                write, num_bytes = self._waiting.popleft()
                self._is_busy = True
            try:
                write()
            except BaseException as error:  # noqa: BLE001 it is raised where the recording runs
                with self._changed:
                    self._error = error
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            finally:
                # The bytes count until they are written.
                with self._changed:
                    self._waiting_bytes -= num_bytes
                    self._changed.notify_all()
                del write
