"""One sequence through the engine: every step of every set, costs, edges, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tests.vocab.cases import Case, make_case, with_masked
from tracekit import schema
from tracekit.errors import InputError, TracekitError, UsageError
from tracekit.measure.head import Head
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.blocks import blocks, runs_of
from tracekit.vocab.controller import Controller, Run, Tracker
from tracekit.vocab.engine import facts
from tracekit.vocab.estimator import CausalEstimator, Cost, Estimator, parse_estimator
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous
from tracekit.vocab.estimators.random import Random
from tracekit.vocab.scheme import Scheme, parse_scheme

if TYPE_CHECKING:
    from tracekit.vocab.view import View

SOME: list[Estimator] = [
    Oracle(),
    Frequency(),
    Previous(),
    Previous(top=3),
    LowRank(rank=2),
    Random(),
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences of any length with scored steps anywhere, pinned tokens, ties, masked tokens."""
    width, num_rows = draw(st.integers(1, 60)), draw(st.integers(1, 9))
    case = make_case(
        draw(st.integers(0, 10**6)),
        width=width,
        num_rows=num_rows,
        scored=sorted(draw(st.sets(st.integers(0, num_rows - 1), min_size=1))),
        num_pinned=draw(st.integers(0, width)),
        has_bias=True,
        spread=draw(st.sampled_from([0.0, 1.0, 20.0])),
    )
    masked = draw(st.sets(st.integers(0, width - 1), max_size=width - 1))
    return with_masked(case, sorted(masked))


@settings(max_examples=40)
@given(cases(), st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_each_step_of_each_set_is_that_of_the_explicit_set(case: Case, sizes: list[int]) -> None:
    logits, pinned = case.logits(), case.pinned_ids.tolist()
    for estimator, tried in zip(SOME, case.tried_fixed(SOME, sizes), strict=True):
        assert tried.asked.scheme.estimator == estimator
        assert tried.asked.fit == "asked"
        ranked = case.candidates(estimator, case.width)
        for step, (row, ids) in enumerate(zip(case.scored_S.tolist(), ranked, strict=True)):
            chosen = int(case.token_ids_T[row + 1])
            for n, size in enumerate(sizes):
                wanted = slow.covered(logits[row], ids, pinned, size, chosen)
                for name, value in wanted.items():
                    got = tried.columns[name][step, n]
                    assert got == pytest.approx(value, rel=1e-5, abs=1e-6), name
                assert not tried.columns["is_fallback"][step, n]


def test_the_columns_are_those_of_the_results() -> None:
    (tried,) = make_case().tried_fixed([Oracle()], [4])
    known = {column.name for column in schema.CANDIDATES.columns}
    named = {"sequence_id", "position", "estimator", "controller", "fit", "size"}
    assert known - named - {"backoff_kl_causal_nats"} <= set(tried.columns)
    assert set(tried.columns) - known == {"nll_full", "missing_mass"}


@settings(max_examples=30)
@given(cases())
def test_facts_are_those_of_loops_over_the_scored_steps(case: Case) -> None:
    found, logits = facts(case.recorded, case.decoder, case.others), case.logits()
    rows = case.scored_S.tolist()
    assert found["position"].tolist() == [row + 1 for row in rows]
    assert found["token_id"].tolist() == case.token_ids_T[case.scored_S + 1].tolist()
    for step, row in enumerate(rows):
        p = slow.softmax(logits[row])
        assert found["best_id"][step] == slow.order(logits[row])[0]
        assert found["best_prob"][step] == pytest.approx(max(p), rel=1e-5)
        entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
        assert found["entropy_nats"][step] == pytest.approx(entropy, rel=1e-5, abs=1e-6)
        for rule, some in slow.sampler_sets(logits[row]).items():
            assert found[f"{rule}_size"][step] == len(some), rule
    columns = {column.name for column in schema.SCORED.columns}
    assert set(found) <= columns


def test_costs_are_those_of_the_estimators_mean_over_steps() -> None:
    case = make_case(num_pinned=2, has_bias=True)
    cells = case.evaluate([Frequency(), LowRank(rank=2), Oracle()], [5])
    assert (cells[0]["macs"], cells[0]["bytes"]) == (0, 0)
    assert cells[1]["macs"] == pytest.approx(2 * (6 + 23))
    assert cells[1]["bytes"] == pytest.approx(4 * (2 * (6 + 23) + 23))
    assert cells[2]["macs"] == pytest.approx(23 * 6)
    assert cells[2]["bytes"] == pytest.approx(4 * 23 * 7)


def test_blocks_of_steps_change_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(1, scored=[1, 2, 5, 6, 7])
    schemes = [parse_scheme(text) for text in ("previous:top=3", "lowrank:rank=2@rate")]
    whole = case.tried(schemes, [3, 9])
    whole_facts = facts(case.recorded, case.decoder, case.others)
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", 1)
    for small, large in zip(case.tried(schemes, [3, 9]), whole, strict=True):
        assert small.asked.scheme == large.asked.scheme
        for name, values_SN in large.columns.items():
            np.testing.assert_allclose(small.columns[name], values_SN, rtol=1e-5, atol=1e-7)
    small_facts = facts(case.recorded, case.decoder, case.others)
    for name, values_S in whole_facts.items():
        np.testing.assert_allclose(small_facts[name], values_S, rtol=1e-5)


def test_blocks_hold_no_more_runs_than_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", 4 * 23)
    for num_rows in (40, 400):
        case = make_case(num_rows=num_rows, scored=list(range(5, num_rows)))
        seen = 0
        for block in blocks(case.recorded, case.decoder, case.others, num_top=7):
            top_RM = block.known.top_RM
            # A block's runs, and one of the block before that no step had been shown.
            assert len(top_RM) <= 4 + 1
            assert top_RM.untyped_storage().nbytes() <= 8 * 7 * (4 + 1)
            assert len(block.chosen_S) <= 4
            seen += len(block.chosen_S)
        assert seen == num_rows - 5


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize("scored", [[0], [4], [0, 1, 2], [0, 3, 7, 8], [2, 4, 6, 8]])
def test_each_run_of_the_head_is_shown_to_the_first_step_after_it(
    rows: int, scored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", 23 * rows)
    case = make_case(scored=scored)
    ran = sorted({*scored, *(row - 1 for row in scored if row)})
    assert runs_of(case.scored_S).tolist() == ran
    logits = case.logits()
    shown: list[list[list[int]]] = []
    for block in blocks(case.recorded, case.decoder, case.others, num_top=3):
        start = 0
        for end in block.known.num_runs_S.tolist():
            shown.append(block.known.top_RM[start:end].tolist())
            start = end
    bounds = zip([-1, *scored], scored, strict=False)
    wanted = [[slow.order(logits[r])[:3] for r in ran if low <= r < high] for low, high in bounds]
    assert shown == wanted


def test_schemes_come_in_the_order_given_one_with_a_controller_once_a_fit() -> None:
    texts = ["oracle@rate", "frequency", "oracle", "frequency@rate", "oracle@fallback"]
    schemes = [parse_scheme(text) for text in texts]
    found = [(one.asked.scheme, one.asked.fit) for one in make_case().tried(schemes, [4])]
    each = ["others", "own", "shuffled"]
    fits = [each, ["asked"], ["asked"], each, ["asked"]]
    assert found == [(s, fit) for s, some in zip(schemes, fits, strict=True) for fit in some]


def test_an_estimator_is_asked_once_a_block_whatever_sets_its_size() -> None:
    asked: list[int] = []

    class Counts(Frequency):
        def ranking(self, view: View, limit: int) -> torch.Tensor:
            asked.append(limit)
            return super().ranking(view, limit)

    texts = ("frequency", "frequency@rate", "frequency@fallback", "frequency@rate@fallback")
    schemes = [parse_scheme(text) for text in texts]
    mine = [Scheme(Counts(), one.controller, one.check) for one in schemes]
    case = make_case()
    for one, other in zip(case.tried(mine, [2, 4]), case.tried(schemes, [2, 4]), strict=True):
        for name, values_SN in other.columns.items():
            np.testing.assert_array_equal(one.columns[name], values_SN)
    assert len(asked) == 1


def test_the_order_of_sizes_is_the_callers() -> None:
    case = make_case(3)
    up, down = case.evaluate([Oracle()], [2, 8]), case.evaluate([Oracle()], [8, 2])
    assert up == down[::-1]


def test_one_scored_step_and_one_token_of_vocabulary_are_enough() -> None:
    (cell,) = make_case(scored=[4]).tried_fixed([Oracle()], [1])
    assert cell.columns["set_size"].shape == (1, 1)
    for one in make_case(width=1, num_pinned=0).evaluate(SOME, [1]):
        assert (one["mass"], one["nll_full"], one["set_size"]) == (1, 0, 1)


def test_a_vocabulary_that_is_pinned_whole_is_the_full_head() -> None:
    for cell in make_case(num_pinned=23).evaluate(SOME, [1]):
        assert (cell["mass"], cell["hit_chosen"], cell["set_size"]) == (1, 1, 23)
        assert cell["neg_log_mass_nats"] == cell["backoff_kl_nats"] == 0


def test_nothing_scored_gives_nothing() -> None:
    case = make_case(scored=[])
    assert case.tried_fixed(SOME, [4]) == []
    assert facts(case.recorded, case.decoder, case.others) == {}


def test_no_schemes_give_nothing() -> None:
    assert make_case().tried([], [4]) == []


def test_half_precision_states_and_weights_are_read() -> None:
    case = make_case(4)
    head = Head(case.head.weight_VE.bfloat16(), None, case.head.spec)
    half = case.but(head=head, own=case.own.but(hidden_TE=case.hidden_TE.bfloat16()))
    assert all(0 < cell["mass"] < 1 for cell in half.evaluate(SOME, [4]))


def test_masked_logits_are_tokens_of_no_mass() -> None:
    case = with_masked(make_case(5, has_bias=True, num_pinned=0), [1, 5])
    small, large = case.evaluate([Oracle()], [20, 21])
    assert small["mass"] < large["mass"] == 1
    assert small["neg_log_mass_nats"] > large["neg_log_mass_nats"] == 0
    assert all({1, 5}.isdisjoint(row) for row in case.candidates(Oracle(), 21))


def test_candidates_that_are_all_masked_have_no_mass() -> None:
    case = make_case(5, has_bias=True, num_pinned=0, scored=[4])
    case = with_masked(case, case.candidates(Frequency(), 3)[0])
    (cell,) = case.evaluate([Frequency()], [3])
    assert cell["mass"] == pytest.approx(0, abs=1e-12)
    assert (cell["neg_log_mass_nats"], cell["hit_argmax"]) == (math.inf, 0)
    assert cell["jsd_nats"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("width", [23, 3000])
def test_the_most_likely_of_equal_tokens_is_the_one_of_lowest_id(width: int) -> None:
    case = make_case(width=width, spread=0.0, num_pinned=0, scored=[4])
    (cell,) = case.evaluate([Oracle()], [1])
    assert cell["hit_argmax"] == 1
    assert case.candidates(Oracle(), 3) == [[0, 1, 2]]
    assert cell["mass"] == pytest.approx(1 / width)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [3, 6])
def test_a_step_without_a_distribution_is_named(bad: float, row: int) -> None:
    case = make_case(scored=[4, 5, 6])
    hidden_TE = case.hidden_TE.clone()
    hidden_TE[row, 0] = bad
    with pytest.raises(InputError, match=f"position {row} "):
        case.but(own=case.own.but(hidden_TE=hidden_TE)).tried_fixed([Oracle()], [4])


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_sizes_that_are_none_are_refused(sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="sizes"):
        make_case().tried_fixed([Oracle()], sizes)


@dataclass(frozen=True)
class Ranks(CausalEstimator):
    """Rank the same tokens at every step."""

    name: ClassVar[str] = "ranks"
    ids: tuple[int, ...] = ()

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return torch.tensor(self.ids[:limit], dtype=torch.int64).expand(view.num_steps, -1)

    def cost(self, view: View, size: int) -> Cost:
        return Cost()


def test_an_estimator_that_ranks_a_token_twice_is_named() -> None:
    words = r"estimator ranks:ids=\(0, 0\): a ranking holds a token twice"
    with pytest.raises(TracekitError, match=words):
        make_case(num_pinned=0).tried_fixed([Ranks((0, 0))], [4])


def test_an_estimator_that_ranks_a_token_that_is_not_there_is_named() -> None:
    with pytest.raises(TracekitError, match=r"estimator ranks.*token 23 of a head of 23 rows"):
        make_case(num_pinned=0).tried_fixed([Ranks((23,))], [4])


def test_an_estimator_may_rank_nothing() -> None:
    (cell,) = make_case(num_pinned=2).evaluate([Ranks()], [4])
    assert cell["set_size"] == 2


class _Weighs(Tracker):
    def __init__(self, value: float) -> None:
        self._value = value

    def weight(self) -> float:
        return self._value

    def observe(self, run: Run) -> None:
        del run


@dataclass(frozen=True)
class Weighs(Controller):
    """Give one weight, whatever it is."""

    name: ClassVar[str] = "weighs"
    sign: str = "1"

    def start(self) -> Tracker:
        return _Weighs(float(self.sign))


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_weight_that_is_none_is_refused_with_its_controller(value: str) -> None:
    with pytest.raises(TracekitError, match=f"controller weighs:sign={value} gave a weight"):
        make_case().tried([Scheme(Frequency(), Weighs(value))], [4])


def test_sizes_of_a_controller_are_those_of_the_sets() -> None:
    case = make_case(num_pinned=2, scored=list(range(9)))
    for one in case.tried([parse_scheme("frequency@rate:gain=9")], [2, 5]):
        wanted = np.minimum(one.asked.size_SN.numpy() + 2, 23)
        np.testing.assert_array_equal(one.columns["set_size"], wanted)


def test_names_of_the_registry_are_tried_as_they_are_by_default() -> None:
    cells = make_case().evaluate([parse_estimator("oracle")], [23])
    assert cells[0]["mass"] == 1
