"""Topic drift: a larger set where the text moves away from what it was about."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tracekit.vocab.controller import CONTROLLERS, Controller, Tracker, bounded_exp

if TYPE_CHECKING:
    from tracekit.vocab.controller import Run


class _Drift(Tracker):
    def __init__(self, controller: Drift) -> None:
        self._gain = controller.gain
        self._last: deque[np.ndarray] = deque(maxlen=controller.window)
        self._total_E = np.zeros(1)

    def weight(self) -> float:
        if not self._last:
            return 1.0
        return bounded_exp(self._gain * _drift(np.mean(self._last, axis=0), self._total_E))

    def observe(self, run: Run) -> None:
        state_E = run.hidden_E.astype(np.float64)
        self._last.append(state_E)
        self._total_E = self._total_E + state_E


def _drift(now_E: np.ndarray, before_E: np.ndarray) -> float:
    """Return 1 - cosine; 0 where one of the two has no direction."""
    length = float(np.linalg.norm(now_E) * np.linalg.norm(before_E))
    return 0.0 if length == 0 else 1 - float(now_E @ before_E) / length


@CONTROLLERS.register("drift")
@dataclass(frozen=True)
class Drift(Controller):
    """Budget ``exp(gain * D)`` times a fitted scale, D the topic drift.

    D = 1 - cos(mean state of the last steps, mean state of all steps so far), the states being the
    inputs of the head's runs, which a decoder has at hand. Drift is more often taken between mean
    embeddings of a window and of the prompt, within which the head does not run.

    Parameters
    ----------
    window
        Steps in the first mean, 1 or more.
    gain
        Weight of the drift.
    """

    name: ClassVar[str] = "drift"
    reads_head: ClassVar[bool] = False
    window: int = 4
    gain: float = 1.0

    def start(self) -> Tracker:
        """Return no state seen yet, which weighs 1."""
        return _Drift(self)
