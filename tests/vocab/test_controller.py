"""Weights and the sizes that they become: means that are met, bounds that are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.vocab.controller import (
    CONTROLLERS,
    SPREAD,
    Controller,
    Run,
    Scale,
    Tracker,
    fit_scale,
    weights,
)
from tracekit.vocab.controllers.fixed import Fixed

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30)


def run(entropy: float) -> Run:
    return Run(entropy, 1.0, -1.0, -1.0, 1.0, np.zeros(3, dtype=np.float32))


@given(WEIGHTS, st.integers(1, 5000), st.floats(1e-6, 1e6))
def test_sizes_are_scaled_weights_within_the_spread(
    values: list[float], size: int, factor: float
) -> None:
    found = Scale(size, factor).sizes(np.array(values)).tolist()
    wanted = [
        max(1, round(min(max(factor * value, size / SPREAD), size * SPREAD))) for value in values
    ]
    assert found == wanted


@settings(max_examples=200)
@given(WEIGHTS, st.integers(1, 5000))
def test_a_fitted_scale_meets_the_mean_to_rounding(values: list[float], size: int) -> None:
    weight_X = np.array(values)
    scale = fit_scale(size, weight_X)
    size_X = scale.sizes(weight_X)
    # Steps change their size by one at a time, so the mean is passed by less than one.
    assert size <= size_X.mean() < size + 1
    assert size_X.min() >= max(1, round(size / SPREAD))
    assert size_X.max() <= size * SPREAD
    lower = Scale(size, scale.factor * (1 - 1e-9)).sizes(weight_X).mean()
    assert lower < size or lower == size_X.mean()


@given(WEIGHTS, st.integers(1, 300), st.integers(1, 300))
def test_larger_means_give_no_smaller_sets(values: list[float], one: int, other: int) -> None:
    weight_X = np.array(values)
    small, large = sorted((one, other))
    small_X, large_X = (fit_scale(size, weight_X).sizes(weight_X) for size in (small, large))
    assert small_X.mean() <= large_X.mean() + 1


@given(st.floats(1e-3, 1e3), st.integers(1, 500), st.integers(1, 9))
def test_equal_weights_are_the_size_asked(value: float, size: int, num_steps: int) -> None:
    weight_X = np.full(num_steps, value)
    assert fit_scale(size, weight_X).sizes(weight_X).tolist() == [size] * num_steps


def test_a_large_weight_gets_a_large_set() -> None:
    weight_X = np.array([1.0, 2.0, 4.0, 1.0])
    assert fit_scale(100, weight_X).sizes(weight_X).tolist() == [50, 100, 200, 50]


def test_the_spread_bounds_what_a_weight_of_another_order_gets() -> None:
    weight_X = np.array([1e-9] + [1.0] * 9)
    sizes = fit_scale(100, weight_X).sizes(weight_X)
    assert sizes[0] == 25
    assert abs(sizes.mean() - 100) < 1


class _Listens(Tracker):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def weight(self) -> float:
        return 1.0 + len(self.seen) + sum(self.seen)

    def observe(self, run: Run) -> None:
        self.seen.append(run.entropy_nats)


@dataclass(frozen=True)
class Listens(Controller):
    name: ClassVar[str] = "listens"
    factor: float = 0.5
    window: int = 2

    def start(self) -> Tracker:
        return _Listens()


@given(st.lists(st.floats(0, 9), max_size=9), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_weight_is_of_the_state_after_the_runs_before_it(
    values: list[float], counts: list[int]
) -> None:
    counts = sorted(min(count, len(values)) for count in counts)
    found = weights(Listens(), [run(value) for value in values], counts)
    assert found == pytest.approx([1 + count + sum(values[:count]) for count in counts])


def test_texts_name_all_parameters() -> None:
    assert Fixed().text == "fixed"
    assert Listens(factor=2.0).text == "listens:factor=2,window=2"
    assert {"fixed", "rate"} <= set(CONTROLLERS.names())


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_numbers_are_from_0_on_and_finite(value: float) -> None:
    with pytest.raises(UsageError, match="factor is a number from 0 on"):
        Listens(factor=value)


def test_fixed_weighs_all_steps_alike() -> None:
    found = weights(Fixed(), [run(value) for value in (1.0, 5.0, 2.0)], [0, 1, 3])
    assert found.tolist() == [1, 1, 1]
    assert not Fixed().adapts
