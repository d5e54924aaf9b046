"""The same size at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.vocab.controller import CONTROLLERS, Controller, Tracker

if TYPE_CHECKING:
    from tracekit.vocab.controller import Run


class _Same(Tracker):
    def weight(self) -> float:
        return 1.0

    def observe(self, run: Run) -> None:
        del run


@CONTROLLERS.register("fixed")
@dataclass(frozen=True)
class Fixed(Controller):
    """The size asked, at every step."""

    name: ClassVar[str] = "fixed"
    adapts: ClassVar[bool] = False
    reads_head: ClassVar[bool] = False

    def start(self) -> Tracker:
        """Return a state that never changes."""
        return _Same()
