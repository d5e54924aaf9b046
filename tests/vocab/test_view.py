"""A view shows what was declared, and of that only what is known before the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.vocab.cases import Case, make_case
from tracekit.errors import TracekitError, UsageError
from tracekit.vocab.blocks import blocks
from tracekit.vocab.layers import LayerChoice
from tracekit.vocab.view import Known, Needs, View

if TYPE_CHECKING:
    from collections.abc import Callable

READS: dict[str, tuple[dict[str, Any], Callable[[View], Any]]] = {
    "hidden": ({"hidden": True}, lambda view: view.hidden_SE),
    "tokens": ({"tokens": True}, lambda view: view.token_ids(0)),
    "others": ({"others": True}, lambda view: view.others),
    "head": ({"head": True}, lambda view: view.head),
    "embedding": ({"embedding": True}, lambda view: view.embedding_VE),
    "attention": ({"attention": LayerChoice.parse("all")}, lambda view: view.attention_SK()),
    "residual": ({"residual": 0}, lambda view: view.residual_SE()),
    "previous": ({"previous": 2}, lambda view: list(view.previous_top())),
}
ROWS = [4, 5, 7]


def known(case: Case | None = None) -> Known:
    case = case or make_case(scored=ROWS)
    (block,) = blocks(case.recorded, case.decoder, case.others, num_top=6)
    return block.known


def view_of(needs: Needs, case: Case | None = None) -> View:
    return View(known(case), needs, "mine", {})


@pytest.mark.parametrize("what", READS)
def test_reading_what_was_not_declared_raises_and_names_it(what: str) -> None:
    needs = Needs(
        **{k: v for name, (one, _) in READS.items() if name != what for k, v in one.items()}
    )
    with pytest.raises(TracekitError, match=f"mine reads '{what}'"):
        READS[what][1](view_of(needs))


@pytest.mark.parametrize("what", READS)
def test_what_was_declared_can_be_read(what: str) -> None:
    declared, read = READS[what]
    assert read(view_of(Needs(**declared))) is not None


def test_arrays_over_positions_end_with_the_last_step() -> None:
    case = make_case(scored=ROWS)
    view = view_of(Needs(hidden=True, tokens=True), case)
    assert torch.equal(view.token_ids_T, case.token_ids_T[:8])
    assert torch.equal(view.hidden_TE, case.hidden_TE[:8])
    assert view.rows_S.tolist() == ROWS
    assert view.num_steps == 3
    for step, row in enumerate(ROWS):
        assert view.token_ids(step).tolist() == case.token_ids_T[: row + 1].tolist()
        assert torch.equal(view.hidden_SE[step], case.hidden_TE[row])


@pytest.mark.parametrize(("text", "layers"), [("all", [0, 1, 2, 3]), ("1", [1]), ("last2", [2, 3])])
def test_attention_is_the_mean_over_heads_and_the_layers_declared(
    text: str, layers: list[int]
) -> None:
    case = make_case(scored=ROWS)
    found_SK = view_of(Needs(attention=LayerChoice.parse(text)), case).attention_SK()
    assert found_SK.shape == (3, 8)
    for step, row in enumerate(ROWS):
        for key in range(8):
            some = [case.own.attention_LHTT[layer, :, row, key] for layer in layers]
            assert float(found_SK[step, key]) == pytest.approx(float(torch.stack(some).mean()))
        assert found_SK[step, row + 1 :].eq(0).all()


def test_attention_of_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has layers 0 to 3"):
        view_of(Needs(attention=LayerChoice.parse("4"))).attention_SK()


def test_estimators_with_the_same_layers_share_their_attention() -> None:
    shared = known()
    needs = Needs(attention=LayerChoice.parse("all"))
    one, other = (View(shared, needs, name, {}).attention_SK() for name in ("one", "other"))
    assert one is other


@pytest.mark.parametrize(("layer", "number"), [(0, 0), (2, 2), (-1, 3), (-4, 0)])
def test_layer_states_are_those_of_the_layer_declared(layer: int, number: int) -> None:
    case = make_case(scored=ROWS)
    found_SE = view_of(Needs(residual=layer), case).residual_SE()
    assert torch.equal(found_SE, case.own.residual_LTE[number, ROWS])


def test_a_step_sees_the_runs_of_the_head_before_it_each_once() -> None:
    view = view_of(Needs(previous=6))
    # The head ran at rows 3, 4, 5, 6, 7; of these, 3 before step 4, then 4, then 5 and 6.
    assert [len(runs_NM) for runs_NM in view.previous_top()] == [1, 1, 2]
    few = view_of(Needs(previous=2))
    for all_NM, some_NM in zip(view.previous_top(), few.previous_top(), strict=True):
        assert all_NM.shape[1] == 6
        assert all_NM[:, :2].tolist() == some_NM.tolist()


def test_shapes_and_types_are_known_without_being_declared() -> None:
    view = view_of(Needs())
    assert (view.num_layers, view.bytes_per_number) == (4, 4)
    assert (view.head_spec.num_rows, view.head_spec.hidden_size) == (23, 6)


def test_no_view_of_a_causal_estimator_has_logits() -> None:
    names = {name for name in dir(view_of(Needs())) if not name.startswith("_")}
    assert names == {
        "attention_SK",
        "bytes_per_number",
        "embedding_VE",
        "head",
        "head_spec",
        "hidden_SE",
        "hidden_TE",
        "memory",
        "num_layers",
        "num_steps",
        "others",
        "previous_top",
        "residual_SE",
        "rows_S",
        "token_ids",
        "token_ids_T",
    }
    assert not any("logits" in name for name in vars(known()))
