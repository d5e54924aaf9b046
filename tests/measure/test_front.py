"""The Pareto front against a comparison of every point with every other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracekit.measure.front import pareto_front


def slow_front(cost: list[float], loss: list[float]) -> list[bool]:
    """Return for each point whether no other is as good in both and better in one."""
    is_front = []
    for a, b in zip(cost, loss, strict=True):
        beaten = False
        for c, d in zip(cost, loss, strict=True):
            beaten = beaten or (c <= a and d <= b and (c < a or d < b))
        is_front.append(not beaten)
    return is_front


few = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(few, few), max_size=30))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    cost, loss = (
        [list(one) for one in zip(*points, strict=True)] or [[], []] if points else [[], []]
    )
    assert pareto_front(cost, loss).tolist() == slow_front(cost, loss)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 10)), min_size=1, max_size=30))
def test_losses_fall_along_the_front(points: list[tuple[float, float]]) -> None:
    cost, loss = (np.array(one) for one in zip(*points, strict=True))
    chosen = pareto_front(cost, loss)
    assert chosen.any()
    order = np.lexsort((loss[chosen], cost[chosen]))
    assert (np.diff(loss[chosen][order]) <= 0).all()
