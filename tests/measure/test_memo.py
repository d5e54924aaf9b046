"""Values that are made once."""

from __future__ import annotations

from tracekit.measure.memo import Memo


def test_a_value_is_made_when_it_is_first_asked_for_and_kept() -> None:
    memo, made = Memo(), []

    def make(value: str) -> list[str]:
        made.append(value)
        return [value]

    first = memo.get("key", lambda: make("one"))
    assert memo.get("key", lambda: make("two")) is first
    assert memo.get(("key", 2), lambda: make("three")) == ["three"]
    assert made == ["one", "three"]


def test_nothing_is_a_value_too() -> None:
    memo = Memo()
    assert memo.get("key", lambda: None) is None
    assert memo.get("key", lambda: 1) is None


def test_what_could_not_be_made_is_tried_again() -> None:
    memo = Memo()

    def fail() -> int:
        raise ArithmeticError

    try:
        memo.get("key", fail)
    except ArithmeticError:
        assert memo.get("key", lambda: 1) == 1


def test_memos_share_nothing() -> None:
    one, other = Memo(), Memo()
    one.get("key", lambda: 1)
    assert other.get("key", lambda: 2) == 2
