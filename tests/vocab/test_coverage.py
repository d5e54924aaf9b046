"""Measures of nested sets against sums over explicit sets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tracekit.errors import TracekitError
from tracekit.vocab.coverage import Truth, coverage

LOGITS = st.one_of(st.floats(-30, 30), st.integers(-2, 2).map(float))


def truth(logits_SV: list[list[float]], chosen_S: list[int], pinned_P: list[int]) -> Truth:
    wide_SV = torch.tensor(logits_SV, dtype=torch.float64)
    pinned = torch.tensor(pinned_P, dtype=torch.int64)
    return Truth.of(wide_SV, torch.tensor(chosen_S), pinned)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int], list[list[int]]]:
    """Logits, chosen tokens, pinned tokens, and rankings of any length with gaps."""
    width, steps = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    ids = list(range(width))
    logits = [draw(st.lists(LOGITS, min_size=width, max_size=width)) for _ in range(steps)]
    chosen = [draw(st.sampled_from(ids)) for _ in range(steps)]
    pinned = draw(st.lists(st.sampled_from(ids), unique=True))
    columns = draw(st.integers(1, width))
    rankings = []
    for _ in range(steps):
        row = draw(st.permutations(ids))[:columns]
        gaps = draw(st.sets(st.integers(0, columns - 1)))
        rankings.append([-1 if place in gaps else i for place, i in enumerate(row)])
    return logits, chosen, pinned, rankings


@settings(max_examples=300, deadline=None)
@given(cases(), st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_every_measure_equals_that_of_the_explicit_set(
    case: tuple[list[list[float]], list[int], list[int], list[list[int]]], sizes: list[int]
) -> None:
    logits, chosen, pinned, rankings = case
    found = coverage(truth(logits, chosen, pinned), torch.tensor(rankings), sizes)
    for step, ranking in enumerate(rankings):
        for n, size in enumerate(sizes):
            wanted = slow.covered(logits[step], ranking, pinned, size, chosen[step])
            assert set(wanted) == set(found)
            for name, value in wanted.items():
                got = float(found[name][step, n])
                assert got == pytest.approx(value, rel=1e-9, abs=1e-14), name


def test_pinned_tokens_come_beside_the_size_and_are_counted_once() -> None:
    logits = [[5.0, 4.0, 3.0, 2.0, 1.0]]
    found = coverage(truth(logits, [4], [0, 4]), torch.tensor([[0, 1, 2, 3, 4]]), [1, 2])
    assert found["set_size_mean"].tolist() == [[3, 4]]
    assert found["hit_chosen"].tolist() == [[1, 1]]
    p = slow.softmax(logits[0])
    assert float(found["mass"][0, 0]) == pytest.approx(p[0] + p[4] + p[1])


def test_a_tail_far_below_rounding_is_still_told() -> None:
    found = coverage(truth([[0.0, -100.0, -101.0]], [1], []), torch.tensor([[0]]), [1])
    tail = math.exp(-100) + math.exp(-101)
    assert float(found["neg_log_mass_nats"]) == pytest.approx(tail, rel=1e-9)
    assert float(found["nll_backoff"]) == pytest.approx(-math.log(tail / 2), rel=1e-9)


def test_a_set_of_almost_no_mass_loses_what_its_logits_say() -> None:
    found = coverage(truth([[0.0, -900.0]], [0], []), torch.tensor([[1]]), [1])
    assert float(found["neg_log_mass_nats"]) == pytest.approx(900)
    assert float(found["mass"]) == 0


def test_the_first_of_equal_logits_is_the_most_likely_token() -> None:
    found = coverage(truth([[1.0, 1.0, 1.0]], [0], []), torch.tensor([[2, 1, 0]]), [1, 2])
    assert found["hit_argmax"].tolist() == [[0, 0]]


def test_a_ranking_that_holds_a_token_twice_is_refused() -> None:
    with pytest.raises(TracekitError, match="twice"):
        coverage(truth([[0.0, 1.0, 2.0]], [0], []), torch.tensor([[1, 1]]), [2])
