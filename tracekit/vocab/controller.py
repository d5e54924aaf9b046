"""What sets the size of a candidate set at each step: state machines over the steps before it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from tracekit.errors import TracekitError
from tracekit.parameters import Named, check_numbers
from tracekit.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST_POWER = 50.0
"""Weights stay within e to plus and minus this: sizes are clipped long before."""

SPREAD = 4
"""A controller's set is at most so many times as large as asked, and at least one part of so many."""


class Run(NamedTuple):
    """What a run of the full head showed, and the state that it ran on.

    Parameters
    ----------
    entropy_nats, varentropy
        S, and the heat capacity C = Var(ln p).
    free_energy, internal_energy
        F = U - T S and U, mean logit subtracted.
    surprisal_nats
        Of the token that came.
    hidden_E
        Its input, float32 [E].
    """

    entropy_nats: float
    varentropy: float
    free_energy: float
    internal_energy: float
    surprisal_nats: float
    hidden_E: np.ndarray


class Tracker(ABC):
    """The state of a controller in one sequence: it cannot see a step before it has been run."""

    @abstractmethod
    def weight(self) -> float:
        """Return how large the next set is relative to others, above 0 and finite."""

    @abstractmethod
    def observe(self, run: Run) -> None:
        """Take in what the head showed at a step, after its set was named."""


def bounded_exp(power: float) -> float:
    """Return e to a power that is clipped to ``LARGEST_POWER``; NaN stays NaN, for all to see."""
    return math.exp(np.clip(power, -LARGEST_POWER, LARGEST_POWER))


class Controller(Named, ABC):
    """Base of all controllers: frozen dataclasses of parameters.

    Raises
    ------
    UsageError
        If a whole number is below 1, or another number below 0 or not finite.
    """

    adapts: ClassVar[bool] = True
    """Whether sets differ in size from step to step."""
    reads_head: ClassVar[bool] = True
    """Whether it reads the full head's logits of earlier steps, not hidden states alone."""

    def __post_init__(self) -> None:
        check_numbers(self, self.text)

    @abstractmethod
    def start(self) -> Tracker:
        """Return the state at the start of a sequence."""


CONTROLLERS: Registry[Controller] = Registry(
    "controller", package="tracekit.vocab.controllers", group="tracekit.controllers"
)
"""All controllers by name."""


def weights(controller: Controller, runs: Sequence[Run], num_runs_S: Sequence[int]) -> np.ndarray:
    """Return the weight of each step.

    Parameters
    ----------
    controller
        The controller.
    runs
        Runs of the head, oldest first.
    num_runs_S
        How many of them came before each step, ascending.

    Returns
    -------
    ndarray
        float64 [S].

    Raises
    ------
    TracekitError
        If a weight is not above 0 and finite.
    """
    tracker, seen = controller.start(), 0
    weight_S = np.empty(len(num_runs_S))
    for step, count in enumerate(num_runs_S):
        for run in runs[seen:count]:
            tracker.observe(run)
        seen = max(seen, count)
        weight_S[step] = tracker.weight()
    if not (np.isfinite(weight_S) & (weight_S > 0)).all():
        msg = f"controller {controller.text} gave a weight that is not above 0 and finite."
        raise TracekitError(msg)
    return weight_S


@dataclass(frozen=True)
class Scale:
    """Factor that turns weights into sizes, for one mean size."""

    size: int
    factor: float

    def sizes(self, weight_S: np.ndarray) -> np.ndarray:
        """Return the size of each step's set, int64 [S], within ``SPREAD`` of the size asked."""
        wanted_S = np.clip(self.factor * weight_S, self.size / SPREAD, self.size * SPREAD)
        return np.maximum(np.rint(wanted_S), 1).astype(np.int64)


def fit_scale(size: int, weight_X: np.ndarray) -> Scale:
    """Return the scale whose sizes have a given mean over some steps.

    Parameters
    ----------
    size
        Mean size.
    weight_X
        Weights of the steps, one at least.

    Notes
    -----
    The mean grows with the factor and is found by bisection; it is met to rounding, because both
    bounds of a size lie around its mean.
    """
    low, high = math.log(size / SPREAD / weight_X.max()), math.log(size * SPREAD / weight_X.min())
    for _ in range(60):
        middle = (low + high) / 2
        is_low = Scale(size, math.exp(middle)).sizes(weight_X).mean() < size
        low, high = (middle, high) if is_low else (low, middle)
    return Scale(size, math.exp(high))
