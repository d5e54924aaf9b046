"""Distribution-free tests and bounds on a risk: the mean loss of a unit drawn as those seen were.

Units (prompts) are exchangeable, each with one loss. Nothing else is assumed of them.
Numpy and scipy alone: reports read this without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import bdtr, betaincinv

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def binomial_p_value(num_failed: ArrayLike, n: int, alpha: float) -> np.ndarray:
    """Return p-values of "the risk is above ``alpha``" for losses that are 0 or 1.

    The exact binomial tail P(Binomial(n, alpha) <= num_failed): super-uniform under the hypothesis.

    Parameters
    ----------
    num_failed
        Units with loss 1, 0 to ``n``, of any shape.
    n
        Units; of none the p-value is 1.
    alpha
        Risk, in (0, 1).

    Returns
    -------
    numpy.ndarray
        float64, of the shape of ``num_failed``.

    Raises
    ------
    UsageError
        If a number is out of range.

    Notes
    -----
    Angelopoulos, Bates, Candes, Jordan and Lei 2021 (arXiv 2110.01052): the p-value that is
    exact where losses are 0 or 1.
    """
    check_share("alpha", alpha)
    failed = np.asarray(num_failed, dtype=np.float64)
    if not ((failed >= 0) & (failed <= n)).all():
        msg = f"units that failed are 0 to n={n}, unlike {failed}."
        raise UsageError(msg)
    if n == 0:
        return np.ones_like(failed)
    return np.asarray(bdtr(failed, n, alpha), dtype=np.float64)


def upper_bound(num_failed: int, n: int, delta: float) -> float:
    """Return the exact upper bound of a risk that holds with confidence 1 - ``delta``.

    Parameters
    ----------
    num_failed, n
        Units with loss 1, of how many; of none the bound is 1.
    delta
        Chance that the bound is too low, in (0, 1). It holds for one set of units that was fixed
        beforehand, not for the best one of several.

    Raises
    ------
    UsageError
        If a number is out of range.

    Notes
    -----
    Clopper and Pearson 1934, one-sided.
    """
    check_share("delta", delta)
    if not 0 <= num_failed <= n:
        msg = f"units that failed are 0 to n={n}, unlike {num_failed}."
        raise UsageError(msg)
    return 1.0 if num_failed == n else float(betaincinv(num_failed + 1, n - num_failed, 1 - delta))


def fixed_sequence(p_values: ArrayLike, delta: float) -> int:
    """Return how many hypotheses are rejected, tested in turn until one is not.

    Parameters
    ----------
    p_values
        In an order that was fixed without the units that they come from.
    delta
        Chance that any true hypothesis is rejected, over all of them together, in (0, 1).

    Raises
    ------
    UsageError
        If ``delta`` is out of range.

    Notes
    -----
    Learn then test (Angelopoulos et al. 2021, arXiv 2110.01052) by fixed sequence testing, the order
    taken from a Pareto front on other data (Laufer-Goldshtein et al. 2023, arXiv 2210.07913). One chain from
    one start, each test at the whole of ``delta``.
    """
    check_share("delta", delta)
    is_rejected = np.asarray(p_values, dtype=np.float64) <= delta
    return int(np.logical_and.accumulate(is_rejected).sum())


def fewest_to_test(alpha: float, delta: float) -> int:
    """Return the fewest units of which none failed that reject "the risk is above ``alpha``".

    It is ceil(ln delta / ln(1 - alpha)): 22 at 0.1 and 0.1.

    Raises
    ------
    UsageError
        If a number is not in (0, 1).
    """
    check_share("alpha", alpha)
    check_share("delta", delta)
    n = max(1, math.ceil(math.log(delta) / math.log1p(-alpha)))
    # The quotient of rounded logarithms may miss a whole number by one.
    while binomial_p_value(0, n, alpha) > delta:
        n += 1
    while n > 1 and binomial_p_value(0, n - 1, alpha) <= delta:
        n -= 1
    return n


@dataclass(frozen=True)
class Conformal:
    """The smallest budget whose expected loss is controlled.

    Parameters
    ----------
    chosen
        Its number, from 0; None: no budget at hand, only one without any loss.
    bound
        (sum of losses + largest loss) / (n + 1) there; NaN without one.
    n
        Units.
    was_monotone
        Whether no unit lost more at a larger budget; else its losses were made so.
    """

    chosen: int | None
    bound: float
    n: int
    was_monotone: bool


def conformal_budget(loss_BN: np.ndarray, alpha: float, largest: float = 1.0) -> Conformal:
    """Return the smallest budget at which the expected loss of a new unit is at most ``alpha``.

    The guarantee is in expectation, over the units at hand and a new one together: weaker than a
    test, which holds with confidence for the units at hand, and to be had from fewer units.

    Parameters
    ----------
    loss_BN
        Losses in [0, ``largest``] at B budgets, ascending, of N units. Where a unit loses more at a
        larger budget, the running maximum from the largest budget down takes its place: an upper
        bound of the loss that falls with the budget.
    alpha
        Expected loss, in (0, 1).
    largest
        Largest loss that is possible.

    Raises
    ------
    UsageError
        If a number is out of range.

    Notes
    -----
    Angelopoulos, Bates, Fisch, Lei and Schuster 2022 (arXiv 2208.02814), theorem 1: the smallest
    budget with n / (n + 1) mean + B / (n + 1) <= alpha. The paper takes a budget of no loss to be
    among them; here that is the full cache, told as None. The running maximum is taken
    of each unit, which leaves units exchangeable.
    """
    check_share("alpha", alpha)
    if not ((loss_BN >= 0) & (loss_BN <= largest)).all():
        msg = f"losses lie in [0, {largest:g}], unlike {loss_BN.min():g} to {loss_BN.max():g}."
        raise UsageError(msg)
    n = loss_BN.shape[1]
    falling_BN = np.maximum.accumulate(loss_BN[::-1], axis=0)[::-1]
    bound_B = (falling_BN.sum(axis=1) + largest) / (n + 1)
    chosen_B = np.flatnonzero(bound_B <= alpha)
    was_monotone = bool((falling_BN == loss_BN).all())
    if not len(chosen_B):
        return Conformal(None, math.nan, n, was_monotone)
    return Conformal(int(chosen_B[0]), float(bound_B[chosen_B[0]]), n, was_monotone)


def fewest_to_conform(alpha: float, largest: float = 1.0) -> int:
    """Return the fewest units without loss for which ``conformal_budget`` finds a budget.

    It is ceil(largest / alpha) - 1: 9 at 0.1.

    Raises
    ------
    UsageError
        If ``alpha`` is not in (0, 1).
    """
    check_share("alpha", alpha)
    n = max(0, math.ceil(largest / alpha) - 1)
    while largest / (n + 1) > alpha:
        n += 1
    while n > 0 and largest / n <= alpha:
        n -= 1
    return n


def check_share(name: str, value: float) -> None:
    """Refuse what is no share between 0 and 1.

    Raises
    ------
    UsageError
        If it is not in (0, 1).
    """
    if not 0 < value < 1:
        msg = f"{name} is a share between 0 and 1, unlike {value:g}."
        raise UsageError(msg)
