"""How long work tells how far it is; the command line draws it, other callers may ignore it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener for one piece of long work."""

    def start(self, what: str, total: int, unit: str) -> None:
        """Begin a piece of work of ``total`` units."""

    def advance(self, amount: int = 1) -> None:
        """Count finished units."""

    def say(self, text: str) -> None:
        """Tell something that happened: a skip, a conversion, a resumption."""


class Silent:
    """The listener of callers who do not look."""

    def start(self, what: str, total: int, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int = 1) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""
