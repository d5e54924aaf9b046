"""The cost of a foretold back-off against KL to the explicit distribution."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tracekit.measure.backoff import causal_backoff_kl_nats


def drawn(
    seed: int, width: int, num_steps: int, scale: float
) -> tuple[list[list[float]], list[set[int]]]:
    """Return distributions, and sets of any size from none to all tokens."""
    rng = random.Random(seed)
    steps = [slow.softmax([rng.gauss(0, scale) for _ in range(width)]) for _ in range(num_steps)]
    sets = [set(rng.sample(range(width), rng.randint(0, width))) for _ in steps]
    return steps, sets


def measured(steps: list[list[float]], sets: list[set[int]]) -> list[float]:
    width = len(steps[0])
    missing, true = [], []
    for p, inside in zip(steps, sets, strict=True):
        outside = [i for i in range(width) if i not in inside]
        tail = math.fsum(p[i] for i in outside)
        even = [p[i] if i in inside else tail / len(outside) for i in range(width)]
        missing.append([tail])
        true.append([slow.kullback_leibler(p, even)])
    found_S1 = causal_backoff_kl_nats(
        torch.tensor(missing, dtype=torch.float64),
        torch.tensor([[len(inside)] for inside in sets]),
        torch.tensor(true, dtype=torch.float64),
        width,
    )
    return found_S1[:, 0].tolist()


@settings(max_examples=150)
@given(
    st.integers(0, 10**6),
    st.integers(1, 20),
    st.integers(1, 8),
    st.sampled_from([0.0, 1.0, 6.0]),
)
def test_it_is_the_divergence_from_the_explicit_distribution(
    seed: int, width: int, num_steps: int, scale: float
) -> None:
    steps, sets = drawn(seed, width, num_steps, scale)
    wanted = slow.causal_backoffs(steps, sets)
    assert measured(steps, sets) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(2, 8))
def test_a_step_hangs_on_no_later_one(seed: int, width: int, num_steps: int) -> None:
    steps, sets = drawn(seed, width, num_steps, 2.0)
    whole = measured(steps, sets)
    for step in range(1, num_steps):
        assert measured(steps[:step], sets[:step]) == pytest.approx(whole[:step], abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_foretelling_costs_no_less_than_knowing(seed: int, num_steps: int) -> None:
    steps, sets = drawn(seed, 9, num_steps, 2.0)
    for p, inside, foretold in zip(steps, sets, measured(steps, sets), strict=True):
        outside = [i for i in range(9) if i not in inside]
        tail = math.fsum(p[i] for i in outside)
        even = [p[i] if i in inside else tail / len(outside) for i in range(9)]
        assert foretold >= slow.kullback_leibler(p, even) - 1e-9


def test_sets_of_all_tokens_cost_nothing_and_teach_that_nothing_is_missed() -> None:
    steps = [[0.5, 0.25, 0.25]] * 3
    found = measured(steps, [{0, 1, 2}, {0, 1, 2}, {0, 1}])
    # One step at which all tokens were alike and two without a miss: (1/3) / 3.
    foretold = 1 / 9
    q = [0.5 / 0.75 * (1 - foretold), 0.25 / 0.75 * (1 - foretold), foretold]
    assert found == pytest.approx([0, 0, slow.kullback_leibler(steps[2], q)])


def test_sizes_are_looked_at_each_by_itself() -> None:
    missing_SN = torch.tensor([[0.1, 0.3], [0.2, 0.4]], dtype=torch.float64)
    size_SN = torch.tensor([[5, 2], [5, 2]])
    kl_SN = torch.tensor([[0.01, 0.2], [0.02, 0.3]], dtype=torch.float64)
    together = causal_backoff_kl_nats(missing_SN, size_SN, kl_SN, 9)
    for n in range(2):
        one = slice(n, n + 1)
        alone = causal_backoff_kl_nats(missing_SN[:, one], size_SN[:, one], kl_SN[:, one], 9)
        torch.testing.assert_close(together[:, one], alone)
