"""What was computed once and is asked for again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


@final
class Memo:
    """Values by key, each made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, made by ``make`` the first time."""
        if key not in self._made:
            self._made[key] = make()
        value: T = self._made[key]
        return value
