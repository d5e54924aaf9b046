from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tracekit.errors import UsageError
from tracekit.simulate.explain import explain
from tracekit.simulate.plan import make_plan
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path


def test_a_strip_says_until_when_each_entry_was_there(trace_folder: Path) -> None:
    trace = Trace(trace_folder)
    tokens, strips = explain(trace, "plain#0", 1, 1, make_plan(["window:kept=6tok,every=4"]))
    (strip,) = strips
    assert "".join(tokens).count("<script>") == 1
    assert strip.policy == "window:kept=6tok,sinks=0,recent=0,every=4,from=prompt"
    first, second = strip.decisions[:2]
    assert first == strip.point
    assert second == first + 4
    # The newest six are left by a decision, and what comes later stays until the next.
    assert np.flatnonzero(strip.kept_T(first)).tolist() == list(range(first - 6, first))
    assert np.flatnonzero(strip.kept_T(second - 1)).tolist() == list(range(first - 6, second - 1))
    assert np.flatnonzero(strip.kept_T(second)).tolist() == list(range(second - 6, second))
    assert len(strip.evicted_at_T) == len(tokens)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (("plane#0", 0, 0), "did you mean 'plain#0'"),
        (("plain#0", 99, 0), "layer 99, KV head 0 cannot be replayed"),
        (("plain#0", 0, 99), "layer 0, KV head 99 cannot be replayed"),
    ],
)
def test_a_place_that_is_not_there_is_refused(
    trace_folder: Path, place: tuple[str, int, int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        explain(Trace(trace_folder), *place, make_plan(["h2o"]))


def test_a_policy_without_an_eviction_point_has_no_strip(trace_folder: Path) -> None:
    plan = make_plan(["knorm:kept=0.5,at=context", "knorm:kept=0.5"])
    _, strips = explain(Trace(trace_folder), "plain#0", 0, 0, plan)
    assert [strip.policy.split(",")[-1] for strip in strips] == ["at=prompt"]
