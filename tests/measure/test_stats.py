"""Bootstrap intervals: seeded, over sequences, null where there are too few."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracekit.errors import UsageError
from tracekit.measure.stats import Interval, bootstrap_mean, paired_difference


def slow_interval(values: list[float], weights: list[float], seed: int) -> tuple[float, float]:
    """Draw by loops; the 2.5th and 97.5th percent of sorted draws."""
    drawn = np.random.default_rng(seed).integers(len(values), size=(1000, len(values)))
    means = []
    for row in drawn:
        total = math.fsum(values[i] * weights[i] for i in row)
        means.append(total / math.fsum(weights[i] for i in row))
    means.sort()
    return means[math.ceil(0.025 * 1000) - 1], means[math.ceil(0.975 * 1000) - 1]


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5, 4.0, 1.0]])
def test_the_interval_is_that_of_a_plain_loop(weights: list[float] | None) -> None:
    values = [0.1, 0.9, 0.4, 0.35, 2.0]
    found = bootstrap_mean(values, seed=7, weights=weights)
    low, high = slow_interval(values, weights or [1.0] * 5, 7)
    assert found.low == pytest.approx(low)
    assert found.high == pytest.approx(high)
    assert found.mean == pytest.approx(np.average(values, weights=weights))
    assert found.n == 5


def test_the_same_seed_gives_the_same_interval_and_another_another() -> None:
    values = np.random.default_rng(0).normal(size=30)
    assert bootstrap_mean(values, seed=1) == bootstrap_mean(values, seed=1)
    assert bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)


def test_fewer_than_three_sequences_have_a_mean_and_no_interval() -> None:
    assert bootstrap_mean([], seed=0) == Interval(None, None, None, 0)
    assert bootstrap_mean([2.0], seed=0) == Interval(2.0, None, None, 1)
    assert bootstrap_mean([2.0, 4.0], seed=0) == Interval(3.0, None, None, 2)
    assert bootstrap_mean([2.0, 2.0, 2.0], seed=0) == Interval(2.0, 2.0, 2.0, 3)


def test_values_that_do_not_apply_are_left_out() -> None:
    values = [1.0, math.nan, 3.0, 2.0]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean([1.0, 3.0, 2.0], seed=3)
    assert bootstrap_mean([math.nan], seed=3).n == 0


def test_an_infinite_value_makes_the_upper_end_infinite_without_a_warning() -> None:
    found = bootstrap_mean([1.0, 2.0, math.inf], seed=0)
    assert found.mean == found.high == math.inf


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    generator = np.random.default_rng(5)
    hits = 0
    for seed in range(200):
        found = bootstrap_mean(generator.normal(size=40), seed=seed)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0 <= found.high
    assert 180 <= hits <= 198


def test_a_paired_difference_does_not_see_what_the_sequences_have_in_common() -> None:
    common = np.random.default_rng(0).normal(scale=100, size=20)
    found = paired_difference(common + 1, common, seed=0)
    assert found.low == pytest.approx(1)
    assert found.high == pytest.approx(1)
    assert paired_difference([1.0, math.nan, math.inf], [0.0, 1.0, math.inf], seed=0).n == 1


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="pairs"):
        paired_difference([1.0], [1.0, 2.0], seed=0)
    with pytest.raises(UsageError, match="weights"):
        bootstrap_mean([1.0, 2.0], seed=0, weights=[1.0])
    with pytest.raises(UsageError, match="weights"):
        bootstrap_mean([1.0, 2.0], seed=0, weights=[1.0, 0.0])
    with pytest.raises(UsageError, match="level"):
        bootstrap_mean([1.0], seed=0, level=1.0)
