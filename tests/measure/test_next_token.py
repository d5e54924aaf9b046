"""Measures of next tokens against loops, closed forms, and themselves in other blocks."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import oracles_next_token as slow
from tracekit.errors import UsageError
from tracekit.measure import next_token
from tracekit.measure.conventions import EXACT, LLAMA_CPP, convention_of
from tracekit.measure.head import Head
from tracekit.measure.next_token import FullRows, NextToken
from tracekit.spec import HeadSpec

if TYPE_CHECKING:
    from tracekit.measure.conventions import Convention

INF = math.inf
TWINS = {EXACT: slow.ours, LLAMA_CPP: slow.llama_cpp}
NAMES = [one.name for one in fields(NextToken)]


class Given(Head):
    """A head whose hidden states are the logits themselves, so that each can be chosen."""

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        return hidden_TE.float().clone()


def given_head(width: int) -> Head:
    return Given(torch.zeros(width, 1), None, HeadSpec(num_rows=width, hidden_size=1))


def compare(
    full_RV: torch.Tensor,
    pruned_RV: torch.Tensor,
    target_R: torch.Tensor,
    convention: Convention = EXACT,
    **options: Any,
) -> NextToken:
    head = given_head(full_RV.shape[1])
    return FullRows(full_RV, head, target_R, convention=convention, **options).compare(pruned_RV)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_equal(found: NextToken, wanted: NextToken) -> None:
    for name in NAMES:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


LOGITS = st.one_of(
    st.floats(-40, 40, width=32),
    st.integers(-3, 3).map(float),
    st.just(-INF),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two runs' logits, near each other or not, with at least one finite a row, and targets."""
    width, num_rows = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    row = st.lists(LOGITS, min_size=width, max_size=width).filter(lambda z: max(z) > -INF)
    full_RV = torch.tensor([draw(row) for _ in range(num_rows)])
    if draw(st.booleans()):
        pruned_RV = torch.tensor([draw(row) for _ in range(num_rows)])
    else:
        step = draw(st.sampled_from([0.0, 1e-6, 1e-4, 1e-2]))
        pruned_RV = full_RV + step * random(num_rows, width, seed=draw(st.integers(0, 99)))
    targets = draw(st.lists(st.integers(0, width - 1), min_size=num_rows, max_size=num_rows))
    return full_RV, pruned_RV, torch.tensor(targets)


def test_logits_that_differ_by_less_than_log_probabilities_can_keep_their_order() -> None:
    logits_RV = torch.tensor([[-6.5e-28, 0.0]])
    found = compare(logits_RV, logits_RV, torch.tensor([1]))
    assert found.same_top.all()
    assert found.hit.all()
    assert found.hit_full.all()


@settings(max_examples=150)
@given(pairs(), st.sampled_from([EXACT, LLAMA_CPP]))
def test_every_measure_equals_its_definition(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor], convention: Convention
) -> None:
    full_RV, pruned_RV, target_R = case
    if convention is LLAMA_CPP:
        # Codes closer than float32 can tell decode to a tie or not with the last bit of the floor.
        spread_R = full_RV.amax(1) - full_RV.amin(1)
        assume(bool(((spread_R == 0) | (spread_R > 1)).all()))
    found = compare(full_RV, pruned_RV, target_R, convention)
    # A code may fall on the other side of a half where exponentials differ in the last bit.
    loose = {"nll_full", "delta_p", "kl_nats"} if convention is LLAMA_CPP else set()
    for row, (full, pruned) in enumerate(zip(full_RV.tolist(), pruned_RV.tolist(), strict=True)):
        twin = TWINS[convention](full, pruned, int(target_R[row]))
        assert set(twin) == set(NAMES)
        for name, wanted in twin.items():
            got = getattr(found, name)[row]
            atol = 1e-5 if name in loose else 3e-13
            np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=atol, err_msg=name)
    assert found.nll_full.dtype == np.float64
    assert found.same_top.dtype == bool
    assert (found.jsd_nats >= 0).all()
    assert (found.jsd_nats <= math.log(2)).all()


@settings(max_examples=50)
@given(pairs())
def test_kl_is_never_negative(case: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    assert (compare(*case).kl_nats >= 0).all()


def test_two_tokens_follow_closed_forms() -> None:
    p, q = 0.75, 0.5
    full_RV, pruned_RV = torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2)
    found = compare(full_RV, pruned_RV, torch.tensor([0]))
    assert found.nll_full[0] == pytest.approx(-math.log(p))
    assert found.nll_pruned[0] == pytest.approx(-math.log(q))
    assert found.kl_nats[0] == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / q))
    assert found.delta_p[0] == pytest.approx(-0.25)
    assert found.top1_margin_full[0] == pytest.approx(math.log(3))
    # The first of equals is still the most likely.
    assert found.margin_pruned[0] == 0
    assert found.same_top[0]
    assert found.hit[0]
    assert found.entropy_full_nats[0] == pytest.approx(-p * math.log(p) - 0.25 * math.log(0.25))


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-5])
def test_a_tiny_kl_keeps_its_digits(size: float) -> None:
    full_RV = 4 * random(3, 5000)
    pruned_RV = full_RV + size * random(3, 5000, seed=1)
    logp, logq = full_RV.double().log_softmax(1), pruned_RV.double().log_softmax(1)
    difference = logp - logq
    # Each term is above 0, so that nothing cancels.
    wanted = (logp.exp() * (torch.expm1(-difference) + difference)).sum(1).numpy()
    found = compare(full_RV, pruned_RV, torch.zeros(3, dtype=torch.int64))
    np.testing.assert_allclose(found.kl_nats, wanted, rtol=1e-3)
    np.testing.assert_allclose(found.jsd_nats, wanted / 4, rtol=3 * size + 2e-2)


@pytest.mark.parametrize("convention", [EXACT, LLAMA_CPP])
def test_equal_states_lose_exactly_nothing(convention: Convention) -> None:
    logits_RV = 1.5 * random(7, 900)
    logits_RV[:, 880:] = -INF
    found = compare(logits_RV, logits_RV.clone(), torch.arange(7), convention)
    assert found.same_top.all()
    assert (found.jsd_nats == 0).all()
    if convention is EXACT:
        assert (found.kl_nats == 0).all()
        assert (found.delta_p == 0).all()
        np.testing.assert_array_equal(found.nll_full, found.nll_pruned)
    else:
        assert np.abs(found.kl_nats).max() < 2e-4
        assert np.abs(found.nll_full - found.nll_pruned).max() < 1.3e-4


def test_masked_tokens_add_nothing_and_a_token_masked_in_one_run_alone_is_infinitely_far() -> None:
    full_RV = torch.tensor([[1.0, 0.0, -INF], [1.0, 0.0, 0.5], [1.0, -INF, 0.5]])
    pruned_RV = torch.tensor([[0.0, 1.0, -INF], [0.0, 1.0, -INF], [0.0, 1.0, 0.2]])
    found = compare(full_RV, pruned_RV, torch.tensor([2, 2, 1]))
    without = compare(full_RV[:1, :2], pruned_RV[:1, :2], torch.tensor([0]))
    assert found.kl_nats[0] == pytest.approx(without.kl_nats[0])
    assert found.kl_nats[1] == INF
    assert math.isfinite(found.kl_nats[2])
    assert found.nll_full.tolist()[0::2] == [INF, INF]
    assert found.nll_pruned.tolist()[:2] == [INF, INF]
    assert found.delta_p[0] == 0


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_a_row_without_a_distribution_is_blank_and_leaves_its_neighbours_alone(
    bad: float, is_full: bool, kept_bytes: int
) -> None:
    full_RV, pruned_RV, target_R = random(3, 6), random(3, 6, seed=1), torch.tensor([0, 1, 2])
    sound = compare(full_RV, pruned_RV, target_R)
    (full_RV if is_full else pruned_RV)[1, 4] = bad
    found = compare(full_RV, pruned_RV, target_R, kept_bytes=kept_bytes)
    assert_rows_equal(found.where(np.array([0, 2])), sound.where(np.array([0, 2])))
    assert found.has_distribution.tolist() == [True, False, True]
    for name in NAMES:
        value = getattr(found, name)[1]
        assert not value if isinstance(value, np.bool_) else math.isnan(value), name


@pytest.mark.parametrize("convention", [EXACT, LLAMA_CPP])
def test_blocks_tiles_and_what_is_kept_change_nothing(
    convention: Convention, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_RV, pruned_RV, target_R = random(11, 50), random(11, 50, seed=1), torch.arange(11)
    whole = compare(full_RV, pruned_RV, target_R, convention)
    monkeypatch.setattr(next_token, "BLOCK_BYTES", 4 * 50 * 4)
    monkeypatch.setattr(next_token, "TILE_NUMBERS", 50 * 3)
    for kept_bytes in (0, 1 << 20):
        found = compare(full_RV, pruned_RV, target_R, convention, kept_bytes=kept_bytes)
        for name in NAMES:
            np.testing.assert_allclose(
                getattr(found, name), getattr(whole, name), rtol=1e-12, atol=1e-13, err_msg=name
            )


def test_a_second_cell_sees_the_same_full_run_as_the_first() -> None:
    full_RV, target_R = random(5, 40), torch.arange(5)
    rows = FullRows(full_RV, given_head(40), target_R)
    first = rows.compare(random(5, 40, seed=1))
    rows.compare(random(5, 40, seed=2))
    assert_rows_equal(rows.compare(random(5, 40, seed=1)), first)


def test_logits_are_those_of_the_head() -> None:
    spec = HeadSpec(num_rows=12, hidden_size=5, scale=0.5, softcap=3.0)
    head = Head(random(12, 5), None, spec)
    full_RE, pruned_RE, target_R = random(4, 5, seed=1), random(4, 5, seed=2), torch.arange(4)
    found = FullRows(full_RE, head, target_R).compare(pruned_RE)
    assert_rows_equal(found, compare(head.logits(full_RE), head.logits(pruned_RE), target_R))


def test_the_top_of_the_base_is_taken_on_codes_and_the_first_of_equals_wins() -> None:
    # Both highest logits have the same code; llama.cpp sees a tie, which the lower id wins.
    full_RV = torch.tensor([[7.99999, 8.0, -30.0]])
    pruned_RV = torch.tensor([[0.0, 1.0, -9.0]])
    target_R = torch.tensor([1])
    assert compare(full_RV, pruned_RV, target_R).same_top[0]
    found = compare(full_RV, pruned_RV, target_R, LLAMA_CPP)
    assert not found.same_top[0]
    assert found.margin_pruned[0] == -1


def test_no_rows_give_empty_columns() -> None:
    found = compare(torch.zeros(0, 5), torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert len(found) == 0
    assert found.hit.dtype == bool


def test_wrong_shapes_and_names_are_refused() -> None:
    with pytest.raises(UsageError, match="targets"):
        compare(random(3, 4), random(3, 4), torch.arange(2))
    with pytest.raises(UsageError, match="same rows"):
        compare(random(3, 4), random(2, 4), torch.arange(3))
    with pytest.raises(UsageError, match=r"llama\.cpp"):
        convention_of("mine")
    assert convention_of("llama.cpp") is LLAMA_CPP
