"""Thermodynamics: the state of the current stretch of text sets the size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tracekit.measure.regimes import SLACK_NATS, THRESHOLD_NATS, ChangePoints
from tracekit.vocab.controller import CONTROLLERS, Controller, Tracker, bounded_exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.vocab.controller import Run

LEAST_STEPS = 3
"""Steps of a stretch before a line is laid through them."""

LEAST_VARIANCE = 1e-6
"""Variance of the entropy, nats squared, below which a stretch has no slope to speak of."""


@dataclass(frozen=True)
class State:
    """Thermodynamic state of a stretch of steps, means over them.

    Parameters
    ----------
    entropy_nats
        S.
    heat_capacity
        C, the varentropy.
    internal_energy
        U.
    temperature
        Slope dU/dS of the least-squares line through the steps; 1, the softmax's own, below
        ``LEAST_STEPS`` steps or ``LEAST_VARIANCE``.
    """

    entropy_nats: float
    heat_capacity: float
    internal_energy: float
    temperature: float

    @property
    def free_energy(self) -> float:
        """F = U - T S: where the line through the steps meets S = 0."""
        return self.internal_energy - self.temperature * self.entropy_nats


class _Stretch:
    """Running means, the variance of S and its covariance with U (Welford)."""

    def __init__(self) -> None:
        self._count = 0
        self._entropy_nats = self._heat_capacity = self._internal_energy = 0.0
        self._spread = self._joint = 0.0

    def add(self, run: Run) -> None:
        self._count += 1
        away_nats = run.entropy_nats - self._entropy_nats
        self._entropy_nats += away_nats / self._count
        self._heat_capacity += (run.varentropy - self._heat_capacity) / self._count
        self._internal_energy += (run.internal_energy - self._internal_energy) / self._count
        self._spread += away_nats * (run.entropy_nats - self._entropy_nats)
        self._joint += away_nats * (run.internal_energy - self._internal_energy)

    def state(self) -> State:
        has_slope = self._count >= LEAST_STEPS and self._spread >= LEAST_VARIANCE * self._count
        temperature = self._joint / self._spread if has_slope else 1.0
        return State(self._entropy_nats, self._heat_capacity, self._internal_energy, temperature)


class _Thermo(Tracker):
    def __init__(self, controller: Thermo) -> None:
        self._of = controller
        self._points = ChangePoints(controller.slack, controller.threshold)
        self._stretch = _Stretch()
        self._count, self._usual_energy = 0, 0.0

    def weight(self) -> float:
        if not self._count:
            return 1.0
        power = DRIVES[self._of.drive](self._of, self._stretch.state(), self._usual_energy)
        return bounded_exp(self._of.gain * power)

    def observe(self, run: Run) -> None:
        if self._points.begins(run.entropy_nats):
            self._stretch = _Stretch()
        self._stretch.add(run)
        self._count += 1
        away = self._stretch.state().free_energy - self._usual_energy
        self._usual_energy += away / self._count


@CONTROLLERS.register("thermo")
@dataclass(frozen=True)
class Thermo(Controller):
    """Budget by the thermodynamic state of the steps since the last change point.

    Claim A6 of the mission; no published numbers exist for it. S, C and U of the state are means over
    the stretch of steady entropy that the text is in (``measure.regimes``); its temperature is how
    fast U grows with S from step to step, which is not the sampler's. The default gain did best on
    half of the demonstration texts; with a gain of 1, fixed sets of the same mean size covered more.

    Parameters
    ----------
    drive
        ``typical``: ``exp(gain * (S + z sqrt(C)))``, with a gain of 1 the size of the typical set, z
        deviations up. ``free-energy``: ``exp(gain * (F - mean F))``, the mean being that of F as it
        was at each step so far; below it, the text is more certain than it has been.
    gain
        Weight of the drive, 1 / nats.
    z
        Deviations of the surprisal above its mean, of ``typical`` alone.
    slack, threshold
        Of the change points, nats.
    """

    name: ClassVar[str] = "thermo"
    drive: Literal["typical", "free-energy"] = "typical"
    gain: float = 0.05
    z: float = 1.0
    slack: float = SLACK_NATS
    threshold: float = THRESHOLD_NATS

    def start(self) -> Tracker:
        """Return no step seen yet, which weighs 1."""
        return _Thermo(self)


def _typical(of: Thermo, state: State, usual_energy: float) -> float:
    del usual_energy
    return state.entropy_nats + of.z * math.sqrt(state.heat_capacity)


def _free_energy(of: Thermo, state: State, usual_energy: float) -> float:
    del of
    return state.free_energy - usual_energy


DRIVES: dict[str, Callable[[Thermo, State, float], float]] = {
    "typical": _typical,
    "free-energy": _free_energy,
}
"""The exponent, before the gain, by name."""
