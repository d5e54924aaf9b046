"""Tests and bounds on risks against sums of binomials, and what they promise, on drawn data."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.measure.risk import (
    binomial_p_value,
    conformal_budget,
    fewest_to_conform,
    fewest_to_test,
    fixed_sequence,
    upper_bound,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SHARES = st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5, 0.9])


def tail(num_failed: int, n: int, alpha: float) -> float:
    """Return P(Binomial(n, alpha) <= num_failed), summed in fractions."""
    one = Fraction(alpha)
    terms = (math.comb(n, k) * one**k * (1 - one) ** (n - k) for k in range(num_failed + 1))
    return float(sum(terms, Fraction(0)))


@given(st.integers(0, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), SHARES)
def test_the_binomial_p_value_is_a_sum(counts: tuple[int, int], alpha: float) -> None:
    failed, n = counts
    assert binomial_p_value(failed, n, alpha) == pytest.approx(tail(failed, n, alpha), rel=1e-10)
    whole = binomial_p_value(np.arange(n + 1), n, alpha)
    assert whole.shape == (n + 1,)
    assert whole[failed] == binomial_p_value(failed, n, alpha)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), SHARES)
def test_the_upper_bound_is_where_the_tail_is_delta(counts: tuple[int, int], delta: float) -> None:
    failed, n = counts
    bound = upper_bound(failed, n, delta)
    if failed == n:
        assert bound == 1
    else:
        assert tail(failed, n, bound) == pytest.approx(delta, rel=1e-6)
    assert upper_bound(0, 0, delta) == 1


@given(st.lists(st.floats(0, 1), max_size=8), SHARES)
def test_a_chain_ends_at_the_first_that_is_not_rejected(
    p_values: list[float], delta: float
) -> None:
    count = 0
    while count < len(p_values) and p_values[count] <= delta:
        count += 1
    assert fixed_sequence(p_values, delta) == count


def test_a_p_value_that_is_delta_rejects() -> None:
    assert fixed_sequence([0.1, 0.1, math.nextafter(0.1, 1), 0.0], 0.1) == 2


@given(SHARES, SHARES)
def test_the_fewest_units_are_the_first_that_suffice(alpha: float, delta: float) -> None:
    n = 1
    while (1 - Fraction(alpha)) ** n > Fraction(delta):
        n += 1
    # A tail that is delta up to rounding may fall on either side.
    assert abs(fewest_to_test(alpha, delta) - n) <= (
        abs(tail(0, n - 1, alpha) - delta) < 1e-12 or abs(tail(0, n, alpha) - delta) < 1e-12
    )
    assert binomial_p_value(0, fewest_to_test(alpha, delta), alpha) <= delta


GRID = sorted({k / 40 for k in range(1, 40)} | {1 / k for k in range(2, 120)} | {0.3**3, 0.7**7})
"""Shares whose quotients and powers are whole numbers but for their rounding, and others."""


def with_neighbours(shares: Iterable[float]) -> list[float]:
    """Return shares and the floats just below and above each: rounded quotients miss there."""
    beside = [math.nextafter(one, end) for one in shares for end in (0, 1)]
    return sorted({*shares, *beside})


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.75, 0.9])
def test_the_fewest_units_that_reject_are_found_by_trying_each_number(alpha: float) -> None:
    powers = {(1 - alpha) ** k for k in range(1, 60)}
    for delta in with_neighbours({*GRID, *powers}):
        tried = next(n for n in itertools.count(1) if binomial_p_value(0, n, alpha) <= delta)
        assert fewest_to_test(alpha, delta) == tried, delta


@pytest.mark.parametrize("largest", [0.1, 0.5, 1.0, 3.0, 10.0])
def test_the_fewest_units_that_conform_are_found_by_trying_each_number(largest: float) -> None:
    for alpha in with_neighbours(GRID):
        tried = next(
            n
            for n in itertools.count()
            if conformal_budget(np.zeros((1, n)), alpha, largest).chosen == 0
        )
        assert fewest_to_conform(alpha, largest) == tried, alpha


def test_the_fewest_units_of_the_usual_choice() -> None:
    assert (fewest_to_test(0.1, 0.1), fewest_to_conform(0.1)) == (22, 9)
    assert fewest_to_test(0.1, 0.05) == math.ceil(math.log(0.05) / math.log(0.9)) == 29


@given(
    st.tuples(st.integers(1, 5), st.integers(0, 12)).flatmap(
        lambda shape: st.lists(
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=shape[1], max_size=shape[1]),
            min_size=shape[0],
            max_size=shape[0],
        )
    ),
    SHARES,
    st.sampled_from([0.25, 1.0, 2.0, 8.0]),
)
def test_the_conformal_budget_is_the_first_of_loops(
    shares: list[list[float]], alpha: float, largest: float
) -> None:
    rows = [[largest * one for one in row] for row in shares]
    n = len(rows[0])
    loss_BN = np.array(rows, dtype=float).reshape(len(rows), n)
    falling = [[max(row[unit] for row in rows[b:]) for unit in range(n)] for b in range(len(rows))]
    bounds = [(sum(row) + largest) / (n + 1) for row in falling]
    within = [b for b, bound in enumerate(bounds) if bound <= alpha]
    found = conformal_budget(loss_BN, alpha, largest)
    assert found.chosen == (within[0] if within else None)
    assert found.was_monotone == (falling == rows)
    assert found.n == n
    assert found.bound == bounds[within[0]] if within else math.isnan(found.bound)


@given(SHARES)
def test_fewer_units_than_the_fewest_find_no_budget(alpha: float) -> None:
    n = fewest_to_conform(alpha)
    assert conformal_budget(np.zeros((1, n)), alpha).chosen == 0
    if n:
        assert conformal_budget(np.zeros((1, n - 1)), alpha).chosen is None


REFUSED: dict[str, Callable[[], object]] = {
    "more failed than there are": lambda: binomial_p_value(3, 2, 0.1),
    "fewer than none failed": lambda: binomial_p_value(-1, 2, 0.1),
    "alpha of one": lambda: binomial_p_value(0, 2, 1.0),
    "loss above the largest": lambda: conformal_budget(np.array([[2.0]]), 0.1),
    "loss above another largest": lambda: conformal_budget(np.array([[0.6]]), 0.1, 0.5),
    "alpha of zero": lambda: fewest_to_conform(0.0),
    "delta that is no number": lambda: fewest_to_test(0.1, math.nan),
    "delta of zero": lambda: fixed_sequence([0.1], 0.0),
    "bound of more than there are": lambda: upper_bound(2, 1, 0.1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_out_of_range_is_refused(what: str) -> None:
    with pytest.raises(UsageError):
        REFUSED[what]()


def test_a_certified_risk_is_above_alpha_no_more_often_than_delta() -> None:
    """8000 draws of 40 units and 8 candidates of rising risk, some of them at the edge of alpha."""
    rng = np.random.default_rng(1)
    alpha, delta, n, draws = 0.1, 0.1, 40, 8000
    for risk_C in (np.linspace(0.01, 0.3, 8), np.linspace(0.1001, 0.3, 8), np.full(8, 0.1001)):
        failed_DC = rng.binomial(n, risk_C, (draws, 8))
        count_D = [fixed_sequence(p, delta) for p in binomial_p_value(failed_DC, n, alpha)]
        worst_D = np.array([risk_C[:count].max(initial=0) for count in count_D])
        assert (worst_D > alpha).mean() <= delta + 3 * math.sqrt(delta * (1 - delta) / draws)
    # Where all is safe enough it also certifies something.
    failed_DC = rng.binomial(n, 0.01, (draws, 8))
    counts = [fixed_sequence(p, delta) for p in binomial_p_value(failed_DC, n, alpha)]
    assert np.mean(np.array(counts) > 0) > 0.9


@pytest.mark.parametrize("is_monotone", [True, False])
def test_the_loss_at_the_conformal_budget_is_below_alpha_in_expectation(is_monotone: bool) -> None:
    rng = np.random.default_rng(2)
    alpha, n, draws, budgets = 0.2, 19, 4000, 6
    losses = []
    for _ in range(draws):
        # Each unit fails below a budget of its own; some fail here and there above it.
        need_N = rng.integers(0, budgets, n + 1)
        loss_BN = (np.arange(budgets)[:, None] < need_N).astype(float)
        if not is_monotone:
            loss_BN = np.maximum(loss_BN, rng.random(loss_BN.shape) < 0.02)
        chosen = conformal_budget(loss_BN[:, :n], alpha).chosen
        losses.append(0.0 if chosen is None else loss_BN[chosen, n])
    assert np.mean(losses) <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / draws)
    assert np.mean(losses) > 0.02
