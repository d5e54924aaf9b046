"""A view shows what was declared, and of that only what is known before the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vocab.cases import make_case
from tracekit.errors import TracekitError
from tracekit.vocab.engine import blocks
from tracekit.vocab.view import Known, Needs, View

if TYPE_CHECKING:
    from collections.abc import Callable

READS: dict[str, Callable[[View], Any]] = {
    "hidden": lambda view: view.hidden_SE,
    "tokens": lambda view: view.token_ids(0),
    "counts": lambda view: view.counts_V,
    "head": lambda view: view.head,
    "previous": lambda view: list(view.previous_top()),
}


def known() -> Known:
    (block,) = blocks(**make_case(scored=[4, 5, 7]).shared, num_top=6)
    return block.known


@pytest.mark.parametrize("what", READS)
def test_reading_what_was_not_declared_raises_and_names_it(what: str) -> None:
    others = {name: True for name in READS if name not in (what, "previous")}
    needs = Needs(**others, previous=0 if what == "previous" else 2)
    with pytest.raises(TracekitError, match=f"mine reads '{what}'"):
        READS[what](View(known(), needs, "mine"))


@pytest.mark.parametrize("what", READS)
def test_what_was_declared_can_be_read(what: str) -> None:
    needs = Needs(hidden=True, tokens=True, counts=True, head=True, previous=2)
    assert READS[what](View(known(), needs, "mine")) is not None


def test_a_step_sees_its_tokens_and_no_later_ones() -> None:
    case = make_case(scored=[4, 5, 7])
    view = View(known(), Needs(tokens=True), "mine")
    for step, row in enumerate([4, 5, 7]):
        assert view.token_ids(step).tolist() == case.token_ids_T[: row + 1].tolist()


def test_a_step_sees_the_runs_of_the_head_before_it_each_once() -> None:
    view = View(known(), Needs(previous=6), "mine")
    # The head ran at rows 3, 4, 5, 6, 7; of these, 3 before step 4, then 4, then 5 and 6.
    assert [len(runs_NM) for runs_NM in view.previous_top()] == [1, 1, 2]
    few = View(known(), Needs(previous=2), "mine")
    for all_NM, some_NM in zip(view.previous_top(), few.previous_top(), strict=True):
        assert all_NM.shape[1] == 6
        assert all_NM[:, :2].tolist() == some_NM.tolist()


def test_no_view_of_a_causal_estimator_has_logits() -> None:
    names = {name for name in dir(View) if not name.startswith("_")}
    assert names == {"counts_V", "head", "hidden_SE", "num_steps", "previous_top", "token_ids"}
