"""The order in which policies are tested: a Pareto front of safety and saving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.measure.front import pareto_front

if TYPE_CHECKING:
    from tracekit.report.recommendation.damage import Damage

_LEAST_SAVING = 0.0005  # Of a policy that frees memory; the full cache saves nothing.


@dataclass(frozen=True)
class Order:
    """Policies as the choosing prompts order them, by their numbers in ``Damage``.

    Parameters
    ----------
    front
        Those that none beats in both safety and saving, the safest first.
    allowed
        Those of which the front was made.
    num_saveless, num_clipped
        Policies left out: those that save nothing, and those clipped on most of these prompts.
    """

    front: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    num_saveless: int = 0
    num_clipped: int = 0

    @property
    def num_beaten(self) -> int:
        """Policies that another one beats in both."""
        return len(self.allowed) - len(self.front)


def order_of(damage: Damage, alpha: float) -> Order:
    """Return the order of tests; no policies where no prompt chooses.

    Parameters
    ----------
    damage
        Only its choosing prompts are looked at.
    alpha
        Share of prompts that may be damaged. Of policies that damage as many, that one is safer
        whose severity is lower where all but this share of the prompts are below it.
    """
    is_choosing_P = damage.is_choosing_P
    if not is_choosing_P.any() or not damage.policies:
        return Order()
    saving_C = 1 - damage.kept_frac_CP[:, is_choosing_P].mean(axis=1)
    is_saving_C = saving_C > _LEAST_SAVING
    # Clipped on most prompts, a policy is not what its text says.
    is_clipped_C = damage.is_clipped_CP[:, is_choosing_P].mean(axis=1) > 0.5
    damaged_C = damage.is_damaged_CP[:, is_choosing_P].mean(axis=1)
    severity_C = np.quantile(
        damage.severity_CP[:, is_choosing_P], 1 - alpha, axis=1, method="inverted_cdf"
    )
    allowed_C = np.flatnonzero(is_saving_C & ~is_clipped_C)
    front = safest_first(damaged_C[allowed_C], severity_C[allowed_C], saving_C[allowed_C])
    return Order(
        front=tuple(int(allowed_C[number]) for number in front),
        allowed=tuple(map(int, allowed_C)),
        num_saveless=int((~is_saving_C).sum()),
        num_clipped=int((is_saving_C & is_clipped_C).sum()),
    )


def safest_first(damaged_C: np.ndarray, severity_C: np.ndarray, saving_C: np.ndarray) -> list[int]:
    """Return the candidates that none beats in both safety and saving, the safest first.

    Parameters
    ----------
    damaged_C
        Share of damaged prompts: the smaller, the safer.
    severity_C
        Where the share is the same, the smaller one is safer.
    saving_C
        Saving, to be large.

    Returns
    -------
    list
        Numbers of candidates, ascending saving; of equals the first.
    """
    pairs_CX = np.stack([damaged_C, severity_C], axis=1)
    danger_C = np.unique(pairs_CX, axis=0, return_inverse=True)[1].reshape(-1)
    front_F = np.flatnonzero(pareto_front(danger_C, -saving_C))
    first_F = np.unique(danger_C[front_F], return_index=True)[1]
    return [int(number) for number in front_F[first_F]]
