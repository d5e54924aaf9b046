"""The rule of sides, and two groups of prompts beside each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.report.verdict.groups import RESAMPLES, group_difference
from tracekit.report.verdict.sides import all_of, any_of, is_above, is_below

ENDS = st.floats(-1, 1) | st.none() | st.just(math.nan)
SIDES = st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=5)
GROUP = st.lists(st.integers(0, 9).map(float), min_size=3, max_size=5)


@given(ENDS, ENDS, st.floats(-1, 1))
def test_a_side_is_told_only_by_a_whole_interval(
    low: float | None, high: float | None, threshold: float
) -> None:
    known = [end for end in (low, high) if end is not None and not math.isnan(end)]
    for test, holds in (
        (is_above, lambda end: end > threshold),
        (is_below, lambda end: end < threshold),
    ):
        found = test(low, high, threshold)
        if len(known) < 2:
            assert found is None
        elif known[0] <= known[1]:
            wanted = {True: True, False: None}[all(map(holds, known))]
            assert found is wanted or (found is False and not any(map(holds, known)))


@given(SIDES)
def test_sides_are_joined_as_words_say(sides: list[bool | None]) -> None:
    alike = sides[0] if all(one is sides[0] for one in sides) else None
    assert all_of(sides) is alike
    assert any_of(sides) is (True if any(one is True for one in sides) else alike)


@settings(max_examples=5, deadline=None)
@given(GROUP, GROUP, st.sampled_from([0.8, 0.95]))
def test_the_difference_of_groups_is_that_of_loops(
    values: list[float], others: list[float], level: float
) -> None:
    rng = np.random.default_rng(0)
    means = []
    for group in (values, others):
        drawn = rng.integers(len(group), size=(RESAMPLES, len(group)))
        means.append([sum(group[place] for place in row) / len(group) for row in drawn])
    less = sorted(one - other for one, other in zip(*means, strict=True))
    found = group_difference(values, others, seed=0, level=level)
    low, high = ((1 - level) / 2, (1 + level) / 2)
    ends = [less[math.ceil(round(part * RESAMPLES, 6)) - 1] for part in (low, high)]
    assert found.n == min(len(values), len(others))
    assert [found.low, found.high] == pytest.approx(ends, abs=1e-9)


def test_groups_of_two_have_no_interval() -> None:
    found = group_difference([1.0, 2.0], [0.0] * 5, seed=0)
    assert (found.mean, found.low, found.high, found.n) == (1.5, None, None, 2)
