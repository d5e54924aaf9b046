from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.record.sources.windows import windows


def walk(num_tokens: int, window: int, stride: int, num_before: int) -> list[tuple[int, int, int]]:
    """Return start, stop and first new token of windows, moved on one by one."""
    size = window - num_before
    step = min(stride, size if num_before else size - 1)
    found, start, reached = [], 0, (0 if num_before else 1)
    while True:
        is_last = start + size >= num_tokens
        if is_last:
            start = max(num_tokens - size, 0)
        stop = min(start + size, num_tokens)
        found.append((start, stop, min(reached, num_tokens)))
        reached = stop
        if is_last:
            return found
        start += step


shapes = st.integers(2, 12).flatmap(
    lambda window: st.tuples(
        st.integers(1, 60), st.just(window), st.integers(1, window), st.integers(0, 1)
    )
)


@given(shape=shapes)
def test_windows_are_those_of_a_plain_walk(shape: tuple[int, int, int, int]) -> None:
    found = [(one.start, one.stop, one.first_new) for one in windows(*shape)]
    assert found == walk(*shape)


@given(shape=shapes)
def test_each_token_counts_once_with_the_longest_context_that_any_window_gives(
    shape: tuple[int, int, int, int],
) -> None:
    num_tokens, window, _, num_before = shape
    found = windows(*shape)
    assert all(one.stop - one.start + num_before <= window for one in found)
    context = {
        token: token - one.start + num_before
        for one in found
        for token in range(one.first_new, one.stop)
    }
    assert sum(one.stop - one.first_new for one in found) == len(context)
    assert sorted(context) == list(range(0 if num_before else 1, num_tokens))
    for token, length in context.items():
        holding = [one for one in found if one.start <= token < one.stop]
        assert length == max(token - one.start + num_before for one in holding) >= 1


def test_the_last_window_is_as_long_as_the_others() -> None:
    found = windows(10, 5, 5, 1)
    assert [(one.start, one.stop, one.first_new) for one in found] == [
        (0, 4, 0),
        (4, 8, 4),
        (6, 10, 8),
    ]


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match="window 2 has no room"):
        windows(9, 2, 2, 2)
