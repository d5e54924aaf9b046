"""Change points of the entropy: known ones are found, none are made up, the future is not read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_ngram as slow
from tracekit.errors import InputError
from tracekit.measure.regimes import ChangePoints, regimes


def noisy(seed: int, levels: list[float], steps: int, noise: float) -> np.ndarray:
    """Return stretches of so many steps around each level, in nats."""
    rng = np.random.default_rng(seed)
    return np.repeat(levels, steps) + noise * rng.standard_normal(len(levels) * steps)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.floats(0, 6), min_size=1, max_size=4),
    st.floats(0.1, 1.5),
    st.floats(0.05, 1),
    st.floats(0.5, 10),
)
def test_stretches_are_those_of_the_definition(
    seed: int, levels: list[float], noise: float, slack: float, threshold: float
) -> None:
    entropy_S = noisy(seed, levels, 12, noise)
    found_S = regimes(entropy_S, slack, threshold)
    assert found_S.tolist() == slow.regimes(entropy_S.tolist(), slack, threshold)


@pytest.mark.parametrize("levels", [[1.0, 4.0], [4.0, 1.0]])
@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_three_nats_is_found_within_eight_steps(levels: list[float], seed: int) -> None:
    found_S = regimes(noisy(seed, levels, 40, 0.5))
    (change,) = np.flatnonzero(np.diff(found_S)) + 1
    assert 40 < change <= 48


def test_there_and_back_are_three_stretches() -> None:
    assert regimes(noisy(0, [1.0, 4.0, 1.0], 40, 0.5)).max() == 2


def test_a_change_below_the_slack_is_none() -> None:
    assert regimes(np.repeat([2.0, 2.4], 500)).max() == 0


@pytest.mark.parametrize("level", [0.0, 0.1, 7.3])
def test_constant_entropy_is_one_stretch(level: float) -> None:
    assert regimes(np.full(1000, level), slack_nats=0, threshold_nats=0).max() == 0


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_one_level_is_one_stretch(seed: int) -> None:
    assert regimes(noisy(seed, [2.0], 300, 0.7)).max() == 0


def test_no_step_of_a_stretch_depends_on_what_comes_after() -> None:
    entropy_S = noisy(3, [1.0, 4.0, 0.5], 20, 1.0)
    whole_S = regimes(entropy_S, 0.2, 3)
    for end in range(len(entropy_S)):
        assert regimes(entropy_S[:end], 0.2, 3).tolist() == whole_S[:end].tolist()


def test_the_column_counts_what_the_test_tells_step_by_step() -> None:
    entropy_S = noisy(4, [1.0, 4.0, 0.5], 20, 1.0)
    points = ChangePoints()
    begins = [points.begins(value) for value in entropy_S.tolist()]
    assert regimes(entropy_S).tolist() == np.cumsum(begins).tolist()


def test_no_steps_are_no_stretches() -> None:
    found_S = regimes([])
    assert found_S.dtype == np.int32
    assert found_S.shape == (0,)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_without_entropy_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="step 1 has no entropy"):
        regimes([1.0, bad, 1.0])
