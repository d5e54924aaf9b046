"""One sequence through the engine: means over steps, costs, edges, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tests.vocab.cases import OWN, Case, make_case
from tracekit import schema
from tracekit.errors import InputError, TracekitError, UsageError
from tracekit.measure.head import Head
from tracekit.vocab import engine
from tracekit.vocab.engine import VocabCell
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost, Estimator, parse_estimator
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous

if TYPE_CHECKING:
    from tracekit.vocab.view import View


def everything() -> list[Estimator]:
    return [parse_estimator(name) for name in ESTIMATORS.names()]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences of any length with scored steps anywhere, pinned tokens, ties, masked tokens."""
    width, num_rows = draw(st.integers(1, 30)), draw(st.integers(1, 9))
    case = make_case(
        draw(st.integers(0, 10**6)),
        width=width,
        num_rows=num_rows,
        scored=sorted(draw(st.sets(st.integers(0, num_rows - 1), min_size=1))),
        num_pinned=draw(st.integers(0, width)),
        has_bias=True,
        spread=draw(st.sampled_from([0.0, 1.0, 20.0])),
    )
    return masked(case, sorted(draw(st.sets(st.integers(0, width - 1), max_size=width - 1))))


def masked(case: Case, ids: list[int]) -> Case:
    """Return the case with some tokens forbidden by the bias."""
    assert case.head.bias_V is not None
    bias_V = case.head.bias_V.index_fill(0, torch.tensor(ids, dtype=torch.int64), -math.inf)
    return case.but(head=Head(case.head.weight_VE, bias_V, case.head.spec))


@settings(max_examples=60, deadline=None)
@given(cases(), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_a_cell_is_the_mean_over_steps_of_the_explicit_sets(case: Case, sizes: list[int]) -> None:
    logits, pinned = case.logits(), case.pinned_ids.tolist()
    estimators: list[Estimator] = [*everything(), Previous(top=3), LowRank(rank=2)]
    cells = iter(case.evaluate(estimators, sizes))
    for estimator in estimators:
        ranked = case.candidates(estimator, case.width)
        for size in sizes:
            steps = [
                slow.covered(logits[row], ids, pinned, size, int(case.token_ids_T[row + 1]))
                for row, ids in zip(case.scored_S.tolist(), ranked, strict=True)
            ]
            cell = next(cells)
            assert (cell.estimator, cell.size) == (estimator.text, size)
            assert cell.num_scored == len(steps)
            for name in steps[0]:
                wanted = sum(step[name] for step in steps) / len(steps)
                assert getattr(cell, name) == pytest.approx(wanted, rel=1e-5, abs=1e-6), name
    assert next(cells, None) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 22), st.integers(0, 5), st.sampled_from([0.0, 1, 5]))
def test_measures_are_those_of_the_pruned_distribution_itself(
    seed: int, size: int, num_pinned: int, spread: float
) -> None:
    case = make_case(seed, scored=[4], num_pinned=num_pinned, spread=spread)
    pinned, chosen = case.pinned_ids.tolist(), int(case.token_ids_T[5])
    (cell,) = case.evaluate([Previous(top=23)], [size])
    (ranked,) = case.candidates(Previous(top=23), 23)
    inside = {*pinned, *[i for i in ranked if i not in pinned][:size]}

    p = slow.softmax(case.logits()[4])
    kept = math.fsum(p[i] for i in inside)
    pruned = [p[i] / kept if i in inside else 0.0 for i in range(23)]
    backed_off = [p[i] if i in inside else (1 - kept) / (23 - len(inside)) for i in range(23)]
    distance = math.fsum(abs(a - b) for a, b in zip(p, pruned, strict=True)) / 2
    divergence = math.fsum(q * math.log(q / a) for a, q in zip(p, pruned, strict=True) if q)
    assert cell.set_size_mean == len(inside)
    assert cell.mass == pytest.approx(1 - distance, abs=1e-6)
    assert cell.neg_log_mass_nats == pytest.approx(divergence, rel=1e-5, abs=1e-6)
    assert math.fsum(backed_off) == pytest.approx(1)
    assert cell.nll_full == pytest.approx(-math.log(p[chosen]), rel=1e-5)
    assert cell.nll_backoff == pytest.approx(-math.log(backed_off[chosen]), rel=1e-5, abs=1e-6)


def test_the_fields_of_a_cell_are_columns_of_the_results() -> None:
    cells = make_case().evaluate([Oracle()], [4])
    columns = {column.name for column in schema.VOCAB_RESULTS.columns}
    assert set(asdict(cells[0])) <= columns
    assert columns - set(asdict(cells[0])) == {"sequence_id", "domain", "controller", "bucket"}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_are_fractions_of_the_full_head(has_bias: bool, dtype: torch.dtype) -> None:
    case = make_case(num_pinned=2, has_bias=has_bias)
    bias_V = None if case.head.bias_V is None else case.head.bias_V.to(dtype)
    case = case.but(head=Head(case.head.weight_VE.to(dtype), bias_V, case.head.spec))
    texts = ["frequency", "previous:top=23", "oracle", "lowrank:rank=2", "lowrank:rank=64"]
    cells = case.evaluate([parse_estimator(text) for text in texts], [5])
    # V = 23 rows of E = 6 numbers, of which 5 candidates and 2 pinned ones are read at each step.
    rows, bias, number_bytes = 7 / 23, 23 * has_bias, dtype.itemsize
    head_numbers = 23 * 6 + bias
    wanted = {
        "frequency": (0, 0),
        "previous:top=23": (0, 5 * 4 / number_bytes),
        "oracle": (23 * 6, head_numbers),
        "lowrank:rank=2": (2 * (6 + 23), 2 * (6 + 23) + bias),
        "lowrank:rank=64": (6 * (6 + 23), 6 * (6 + 23) + bias),
    }
    for cell in cells:
        macs, numbers = wanted[cell.estimator]
        assert cell.set_size_mean == 7
        assert cell.macs_frac == pytest.approx(rows + macs / (23 * 6))
        assert cell.cost_frac == pytest.approx(rows + numbers / head_numbers)


def test_a_step_with_fewer_candidates_than_asked_costs_only_these() -> None:
    (cell,) = make_case(scored=[0], num_pinned=2).evaluate([Previous()], [5])
    assert cell.set_size_mean == 2
    assert cell.macs_frac == pytest.approx(2 / 23)


def test_blocks_of_steps_change_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(1, scored=[1, 2, 5, 6, 7])
    whole = case.evaluate(everything(), [3, 9])
    monkeypatch.setattr(engine, "BLOCK_NUMBERS", 1)
    for small, large in zip(case.evaluate(everything(), [3, 9]), whole, strict=True):
        assert (small.estimator, small.size) == (large.estimator, large.size)
        assert small.set_size_mean == large.set_size_mean
        assert small.mass == pytest.approx(large.mass, rel=1e-6)
        assert small.nll_backoff == pytest.approx(large.nll_backoff, rel=1e-6)


def test_one_estimator_alone_gives_what_it_gives_among_others() -> None:
    case = make_case(2)
    together = case.evaluate(everything(), [2, 8])
    alone = [cell for one in everything() for cell in case.evaluate([one], [2, 8])]
    assert together == alone
    assert case.evaluate([Oracle(), Oracle()], [2]) == case.evaluate([Oracle()], [2]) * 2


def test_the_order_of_sizes_is_the_callers() -> None:
    case = make_case(3)
    up, down = case.evaluate([Oracle()], [2, 8]), case.evaluate([Oracle()], [8, 2])
    assert up == down[::-1]


def test_one_scored_step_and_one_token_of_vocabulary_are_enough() -> None:
    (cell,) = make_case(scored=[4]).evaluate([Oracle()], [1])
    assert cell.num_scored == 1
    for one in make_case(width=1, num_pinned=0).evaluate(everything(), [1]):
        assert (one.mass, one.nll_full, one.set_size_mean) == (1, 0, 1)


def test_a_vocabulary_that_is_pinned_whole_is_the_full_head() -> None:
    case = make_case(num_pinned=23)
    for cell in case.evaluate(everything(), [1]):
        assert (cell.mass, cell.hit_chosen, cell.set_size_mean) == (1, 1, 23)


def test_a_pinned_token_that_is_given_twice_counts_once() -> None:
    case = make_case()
    twice = case.but(pinned_ids=torch.cat([case.pinned_ids, case.pinned_ids]))
    assert twice.evaluate(everything(), [4]) == case.evaluate(everything(), [4])


def test_nothing_scored_gives_no_cells() -> None:
    assert make_case(scored=[]).evaluate(everything(), [4]) == []


def test_no_estimators_give_no_cells() -> None:
    assert make_case().evaluate([], [4]) == []


def test_half_precision_states_and_weights_are_read() -> None:
    case = make_case(4)
    head = Head(case.head.weight_VE.bfloat16(), None, case.head.spec)
    half = case.but(head=head, hidden_TE=case.hidden_TE.bfloat16())
    assert all(0 < cell.mass < 1 for cell in half.evaluate(everything(), [4]))


def test_masked_logits_are_tokens_of_no_mass() -> None:
    case = masked(make_case(5, has_bias=True, num_pinned=0), [1, 5])
    small, large = case.evaluate([Oracle()], [20, 21])
    assert small.mass < large.mass == 1
    assert small.neg_log_mass_nats > large.neg_log_mass_nats == 0
    assert all({1, 5}.isdisjoint(row) for row in case.candidates(Oracle(), 21))


def test_a_chosen_token_that_is_masked_is_a_surprise_without_end_but_to_the_back_off() -> None:
    case = make_case(5, has_bias=True, scored=[4], num_pinned=0)
    small, whole = masked(case, [int(case.token_ids_T[5])]).evaluate([Oracle()], [4, 23])
    assert small.nll_full == whole.nll_full == whole.nll_backoff == math.inf
    tail = 1 - small.mass
    assert small.nll_backoff == pytest.approx(-math.log(tail / 19), rel=1e-6)


def test_candidates_that_are_all_masked_have_no_mass() -> None:
    case = masked(make_case(5, has_bias=True, num_pinned=0, scored=[4]), [0, 1, 2])
    alone = case.but(trace=tuple(pair for pair in case.trace if pair[0] == OWN))
    (cell,) = alone.evaluate([parse_estimator("frequency")], [3])
    assert (cell.mass, cell.neg_log_mass_nats, cell.hit_argmax) == (0, math.inf, 0)


@pytest.mark.parametrize("width", [23, 3000])
def test_the_most_likely_of_equal_tokens_is_the_one_of_lowest_id(width: int) -> None:
    case = make_case(width=width, spread=0.0, num_pinned=0, scored=[4])
    (cell,) = case.evaluate([Oracle()], [1])
    assert cell.hit_argmax == 1
    assert case.candidates(Oracle(), 3) == [[0, 1, 2]]
    assert cell.mass == pytest.approx(1 / width)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [3, 6])
def test_a_step_without_a_distribution_is_named(bad: float, row: int) -> None:
    case = make_case(scored=[4, 5, 6])
    hidden_TE = case.hidden_TE.clone()
    hidden_TE[row, 0] = bad
    with pytest.raises(InputError, match=f"position {row} "):
        case.but(hidden_TE=hidden_TE).evaluate([Oracle()], [4])


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_sizes_that_are_none_are_refused(sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="sizes"):
        make_case().evaluate([Oracle()], sizes)


@dataclass(frozen=True)
class Repeats(CausalEstimator):
    """Rank one token over and over."""

    name: ClassVar[str] = "repeats"

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return torch.zeros((view.num_steps, limit), dtype=torch.int64)

    def cost(self, head: object, size: int) -> Cost:
        return Cost()


def test_an_estimator_that_ranks_a_token_twice_is_named() -> None:
    with pytest.raises(TracekitError, match="estimator repeats: a ranking holds a token twice"):
        make_case(num_pinned=0).evaluate([Repeats()], [4])


def test_a_cell_knows_nothing_of_its_own_prompt() -> None:
    case = make_case(6)
    loud = case.but(trace=(*case.trace, *[(OWN, 22)] * 1000))
    frequency = [parse_estimator("frequency")]
    assert loud.evaluate(frequency, [4]) == case.evaluate(frequency, [4])


def test_cells_are_plain_numbers() -> None:
    for cell in make_case().evaluate(everything(), [4]):
        assert isinstance(cell, VocabCell)
        assert {type(value) for value in asdict(cell).values()} == {str, int, float}
