"""Progress on stderr: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress as RichProgress

    from tracekit.progress import Progress

PLAIN_EVERY_S = 10.0
"""Plain progress lines come at most so often."""


class Style(StrEnum):
    """How progress is shown."""

    auto = "auto"
    bar = "bar"
    plain = "plain"
    none = "none"


class Plain:
    """Plain lines: what, how far, how long it will take."""

    def __init__(self) -> None:
        self._what, self._total, self._unit, self._done = "", 0, "", 0
        self._start = self._last = time.monotonic()

    def start(self, what: str, total: int, unit: str) -> None:
        """Begin a piece of work."""
        self._what, self._total, self._unit, self._done = what, total, unit, 0
        self._start = self._last = time.monotonic()
        self.say(f"{what}: {total} {unit}")

    def advance(self, amount: int = 1) -> None:
        """Count finished units; now and then, and at the end, print a line."""
        self._done += amount
        now = time.monotonic()
        if self._done < self._total and now - self._last < PLAIN_EVERY_S:
            return
        self._last, spent = now, now - self._start
        left = spent / self._done * (self._total - self._done)
        self.say(
            f"{self._what}: {self._done}/{self._total} {self._unit}, {spent:.0f} s spent, "
            f"about {left:.0f} s left"
        )

    def say(self, text: str) -> None:
        """Print a line."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class Notes(Plain):
    """Only what happened, no counting."""

    def start(self, what: str, total: int, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int = 1) -> None:
        """Do nothing."""


class Bar:
    """A rich progress bar."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task = bar.add_task("loading", total=None)

    def start(self, what: str, total: int, unit: str) -> None:
        """Begin a piece of work."""
        self._bar.reset(self._task, total=total, description=f"{what} {total} {unit}")

    def advance(self, amount: int = 1) -> None:
        """Count finished units."""
        self._bar.advance(self._task, amount)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)


@contextmanager
def shown(style: Style) -> Iterator[Progress]:
    """Yield a listener of the wanted style."""
    if style is Style.none:
        yield Notes()
    elif style is Style.plain or (style is Style.auto and not sys.stderr.isatty()):
        yield Plain()
    else:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(stderr=True)) as bar:
            yield Bar(bar)
