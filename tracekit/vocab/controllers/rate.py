"""Entropy rate: a larger set while entropy is high or rises, a smaller one while it falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.vocab.controller import CONTROLLERS, Controller, Tracker, bounded_exp

if TYPE_CHECKING:
    from tracekit.vocab.controller import Run


class _Rate(Tracker):
    def __init__(self, controller: Rate) -> None:
        self._of = controller
        self._level: float | None = None
        self._slope = 0.0

    def weight(self) -> float:
        return bounded_exp(self._of.level * (self._level or 0.0) + self._of.gain * self._slope)

    def observe(self, run: Run) -> None:
        before = run.entropy_nats if self._level is None else self._level
        share = 1 / self._of.window
        self._level = before + share * (run.entropy_nats - before)
        self._slope += share * (self._level - before - self._slope)


@CONTROLLERS.register("rate")
@dataclass(frozen=True)
class Rate(Controller):
    """Budget ``exp(level * EMA(S) + gain * EMA(change of EMA(S)))`` times a fitted scale.

    Claim A5 of the mission in the form of ``k0 exp(a EMA(H) + b change)``; no published numbers
    exist for it.

    Parameters
    ----------
    gain
        Weight of the entropy's change, steps a nat.
    level
        Weight of the entropy itself, 1 / nats; 0 leaves the rate alone.
    window
        Steps that the two exponential means look back, about; 1 or more.
    """

    name: ClassVar[str] = "rate"
    gain: float = 4.0
    level: float = 0.0
    window: int = 8

    def start(self) -> Tracker:
        """Return no entropy seen yet, which weighs 1."""
        return _Rate(self)
