from __future__ import annotations

import pytest

from tracekit.errors import UsageError
from tracekit.registry import Registry, unknown


def test_a_name_is_taken_once() -> None:
    registry: Registry[object] = Registry("thing", package="tracekit.measure", group="none")

    @registry.register("one")
    class One:
        pass

    assert registry.get("one") is One
    with pytest.raises(ValueError, match="two things are named 'one'"):
        registry.register("one")(int)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    registry: Registry[object] = Registry("thing", package="tracekit.measure", group="none")
    registry.register("streaming")(int)
    with pytest.raises(UsageError, match="unknown thing 'streming'; did you mean 'streaming'"):
        registry.get("streming")
    assert unknown("thing", "x", ["alpha"]) == "unknown thing 'x'. Known: alpha."
