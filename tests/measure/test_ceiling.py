"""Amdahl's law for the head, against the sum of what a step costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.measure.ceiling import ceiling, head_share


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.floats(0, 5))
def test_the_speed_up_is_the_step_before_over_the_step_after(
    head_bytes: int, other_bytes: int, cost_frac: float
) -> None:
    share = head_share(head_bytes, head_bytes + other_bytes)
    assert share is not None
    after = other_bytes + cost_frac * head_bytes
    assert ceiling(share, cost_frac) == pytest.approx((head_bytes + other_bytes) / after, rel=1e-3)


def test_a_head_of_a_fifth_that_is_free_gives_a_quarter_more() -> None:
    assert head_share(20, 100) == 0.2
    assert ceiling(0.2) == pytest.approx(1.25)
    assert ceiling(0.2, 0.5) == pytest.approx(1 / 0.9)
    assert ceiling(0.2, 1.0) == 1
    assert ceiling(0.0) == 1
    assert ceiling(0.2, 2.0) < 1


def test_a_model_of_unknown_size_has_no_share() -> None:
    assert head_share(20, None) is None


@pytest.mark.parametrize(("head_bytes", "model_bytes"), [(0, 10), (11, 10), (-1, 10)])
def test_a_head_that_is_no_part_of_its_model_is_refused(head_bytes: int, model_bytes: int) -> None:
    with pytest.raises(UsageError, match="cannot be part of a model of 10"):
        head_share(head_bytes, model_bytes)


@pytest.mark.parametrize("share", [1.0, -0.1, math.nan])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="share is"):
        ceiling(share)


@pytest.mark.parametrize("cost_frac", [-0.1, math.nan])
def test_a_negative_cost_is_refused(cost_frac: float) -> None:
    with pytest.raises(UsageError, match="cost is"):
        ceiling(0.5, cost_frac)
