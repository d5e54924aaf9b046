"""Stretches of steady entropy, found online by the Page-Hinkley test."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from tracekit.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SLACK_NATS = 0.5
"""Distance from the mean of its stretch that a step may have without counting."""

THRESHOLD_NATS = 8.0
"""Sum of what goes beyond the slack, on one side, that ends a stretch."""


@final
class ChangePoints:
    """Tells of each step, from it and those before, whether another stretch begins with it.

    The two-sided test of Page (1954, Biometrika 41, "Continuous inspection schemes") and Hinkley
    (1971, Biometrika 58): with m_i the mean of a stretch up to its step i and d_i = x_i - m_i, it
    ends as soon as the sum of d_i - slack, or of -d_i - slack, lies more than the threshold above
    the lowest that this sum has been, 0 at its start included.

    A decoder cannot go back: the step that tips the sum is the first of the new stretch, although
    the level may have changed some steps earlier, and both sums and the mean begin anew there.

    Parameters
    ----------
    slack_nats, threshold_nats
        Of the test; both from 0 on.
    """

    def __init__(
        self, slack_nats: float = SLACK_NATS, threshold_nats: float = THRESHOLD_NATS
    ) -> None:
        self._slack_nats, self._threshold_nats = slack_nats, threshold_nats
        self._restart()

    def begins(self, entropy_nats: float) -> bool:
        """Take in the next step and return whether a new stretch begins with it.

        The first step of all begins none: it is in stretch 0. NaN begins none, and nothing does
        after it.
        """
        self._add(entropy_nats)
        if max(self._above_nats, self._below_nats) <= self._threshold_nats:
            return False
        self._restart()
        self._add(entropy_nats)
        return True

    def _restart(self) -> None:
        self._count, self._mean_nats = 0, 0.0
        self._above_nats = self._below_nats = 0.0

    def _add(self, entropy_nats: float) -> None:
        self._count += 1
        self._mean_nats += (entropy_nats - self._mean_nats) / self._count
        away_nats = entropy_nats - self._mean_nats
        # Held at 0 from below, a sum is its distance from the lowest that it has been.
        self._above_nats = max(0.0, self._above_nats + away_nats - self._slack_nats)
        self._below_nats = max(0.0, self._below_nats - away_nats - self._slack_nats)


def regimes(
    entropy_S: ArrayLike, slack_nats: float = SLACK_NATS, threshold_nats: float = THRESHOLD_NATS
) -> np.ndarray:
    """Return the stretch of steady entropy that each step is in.

    Parameters
    ----------
    entropy_S
        Entropies of steps in order, nats [S].
    slack_nats, threshold_nats
        Of the test of ``ChangePoints``.

    Returns
    -------
    ndarray
        int32 [S], counted from 0. What a step gets depends on it and the steps before alone.

    Raises
    ------
    InputError
        If an entropy is not finite.
    """
    values_S = np.asarray(entropy_S, dtype=np.float64)
    if len(wrong_X := np.flatnonzero(~np.isfinite(values_S))):
        msg = f"step {wrong_X[0]} has no entropy: validate the trace, or record it again."
        raise InputError(msg)
    points = ChangePoints(slack_nats, threshold_nats)
    begins_S = [points.begins(value) for value in values_S.tolist()]
    return np.cumsum(begins_S, dtype=np.int32)
