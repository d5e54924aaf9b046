"""What every estimator keeps to, whoever wrote it: one suite over the registry.

A new estimator file is tested here with its default parameters and with small ones, on all cases.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vocab.cases import OWN, Case, make_case
from tracekit.measure.head import Head
from tracekit.vocab import engine
from tracekit.vocab.estimator import (
    ESTIMATORS,
    CausalEstimator,
    Cost,
    Estimator,
    HindsightEstimator,
    parse_estimator,
)
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.vocab.view import View


def with_all(name: str, value: int) -> Estimator:
    """Return an estimator all of whose parameters have one value."""
    kind = ESTIMATORS.get(name)
    return kind(**{one.name: value for one in fields(kind)})  # type: ignore[arg-type]


def variants() -> dict[str, Estimator]:
    """Return each estimator as it is by default and with small parameters, once each.

    On a small case a default is often the whole vocabulary or the whole rank.
    """
    found = [
        one
        for name in ESTIMATORS.names()
        for one in (parse_estimator(name), with_all(name, 1), with_all(name, 3))
    ]
    return {one.text: one for one in found}


VARIANTS = variants()
CAUSAL = {text: one for text, one in VARIANTS.items() if one.causal}
SIZES = [1, 2, 5, 10, 20]


def masked() -> Case:
    """Return a case whose bias forbids some tokens."""
    case = make_case(5, has_bias=True)
    assert case.head.bias_V is not None
    bias_V = case.head.bias_V.index_fill(0, torch.tensor([0, 1, 5]), -torch.inf)
    return case.but(head=Head(case.head.weight_VE, bias_V, case.head.spec))


def half() -> Case:
    case = make_case(6)
    head = Head(case.head.weight_VE.bfloat16(), None, case.head.spec)
    return case.but(head=head, hidden_TE=case.hidden_TE.bfloat16())


CASES: dict[str, Callable[[], Case]] = {
    "plain": make_case,
    "biased": lambda: make_case(1, has_bias=True),
    "equal logits": lambda: make_case(2, spread=0.0),
    "steps with gaps": lambda: make_case(3, scored=[0, 2, 3, 7]),
    "one step": lambda: make_case(4, scored=[5]),
    "masked tokens": masked,
    "half precision": half,
    "one token": lambda: make_case(7, width=1, num_pinned=0),
    "all tokens pinned": lambda: make_case(8, num_pinned=23),
}

every_variant = pytest.mark.parametrize("estimator", VARIANTS.values(), ids=VARIANTS)
every_causal = pytest.mark.parametrize("estimator", CAUSAL.values(), ids=CAUSAL)
every_case = pytest.mark.parametrize("kind", CASES)


@every_variant
def test_an_estimator_is_of_one_of_the_two_kinds_and_says_what_it_is(estimator: Estimator) -> None:
    kind = CausalEstimator if estimator.causal else HindsightEstimator
    assert isinstance(estimator, kind)
    assert type(estimator).__doc__
    assert ESTIMATORS.get(estimator.name) is type(estimator)


@every_variant
def test_text_is_an_identity_that_parses_back(estimator: Estimator) -> None:
    again = parse_estimator(estimator.text)
    assert again == estimator
    assert again.text == estimator.text
    for one in fields(estimator):  # type: ignore[arg-type]
        other = replace(estimator, **{one.name: 7})  # type: ignore[type-var]
        assert other.text != estimator.text
        assert parse_estimator(other.text) == other


@every_variant
@every_case
@pytest.mark.parametrize("limit", [1, 5, 23])
def test_a_ranking_holds_distinct_tokens_and_no_more_than_asked(
    estimator: Estimator, kind: str, limit: int
) -> None:
    case = CASES[kind]()
    ranked = case.candidates(estimator, min(limit, case.width))
    assert len(ranked) == len(case.scored_S)
    for row in ranked:
        assert len(row) == len(set(row)) <= limit
        assert all(0 <= i < case.width for i in row)


@every_variant
@every_case
def test_a_smaller_ranking_is_a_prefix_of_a_larger_one(estimator: Estimator, kind: str) -> None:
    case = CASES[kind]()
    large = case.candidates(estimator, case.width)
    for limit in range(1, case.width):
        assert case.candidates(estimator, limit) == [row[:limit] for row in large]


@every_variant
def test_blocks_of_steps_change_no_ranking(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(2, scored=[2, 3, 6, 7, 8])
    whole = case.candidates(estimator, 23)
    monkeypatch.setattr(engine, "BLOCK_NUMBERS", 2 * case.width)
    assert case.candidates(estimator, 23) == whole


def changed_from(case: Case, *, row: int, token: int) -> Case:
    """Return the case with hidden states from a row on and tokens from a position on replaced."""
    hidden_TE, ids_T = case.hidden_TE.clone(), case.token_ids_T.clone()
    hidden_TE[row:] = -3 * hidden_TE[row:].flip(1)
    ids_T[token:] = (ids_T[token:] + 1) % case.width
    return case.but(hidden_TE=hidden_TE, token_ids_T=ids_T)


def assert_no_look_ahead(estimator: Estimator, case: Case) -> None:
    """Fail if what comes after a step changes a candidate of it or of an earlier step.

    Later tokens of the own prompt are in the trace too, so they are changed there as well. A step's
    own hidden state is the input of its head: it may count only where it was declared.
    """
    before = case.candidates(estimator, case.width)
    for step, row in enumerate(case.scored_S.tolist()):
        first = row + 1 if estimator.needs.hidden else row
        other = changed_from(case, row=first, token=row + 1)
        new = [(OWN, token) for token in other.token_ids_T.tolist()]
        other = other.but(trace=(*new, *(pair for pair in case.trace if pair[0] != OWN)))
        assert other.candidates(estimator, case.width)[: step + 1] == before[: step + 1]


@every_causal
@pytest.mark.parametrize("scored", [None, [0, 2, 3, 7], [5]])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_no_candidate_up_to_a_step_depends_on_what_comes_after(
    estimator: Estimator,
    scored: list[int] | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "BLOCK_NUMBERS", block)
    assert_no_look_ahead(estimator, make_case(3, scored=scored))


@every_causal
def test_no_causal_candidate_depends_on_the_logits_of_its_own_step(estimator: Estimator) -> None:
    case = make_case(4)
    for block in engine.blocks(**case.shared, num_top=estimator.needs.previous):
        ids_SK = estimator.candidates(block.known, block.logits_SV, 20)
        none_SK = estimator.candidates(block.known, torch.full_like(block.logits_SV, torch.nan), 20)
        assert torch.equal(ids_SK, none_SK)


@every_causal
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6), row=st.integers(0, 8), spread=st.sampled_from([0.0, 0.1, 1.0, 20.0])
)
def test_at_every_step_and_size_the_oracle_covers_no_less(
    estimator: Estimator, seed: int, row: int, spread: float
) -> None:
    case = make_case(seed, scored=[row], spread=spread)
    cells = case.evaluate([Oracle(), estimator], SIZES)
    for best, cell in zip(cells[: len(SIZES)], cells[len(SIZES) :], strict=True):
        assert cell.mass <= best.mass + 1e-12
        assert cell.neg_log_mass_nats >= best.neg_log_mass_nats - 1e-12
        assert cell.hit_argmax <= best.hit_argmax == 1


@every_variant
@every_case
def test_larger_sets_cover_no_less_and_cost_no_less(estimator: Estimator, kind: str) -> None:
    cells = CASES[kind]().evaluate([estimator], [1, 3, 8, 15, 23])
    for small, large in itertools.pairwise(cells):
        assert small.mass <= large.mass
        assert small.neg_log_mass_nats >= large.neg_log_mass_nats
        assert small.hit_chosen <= large.hit_chosen
        assert small.hit_argmax <= large.hit_argmax
        assert small.set_size_mean <= large.set_size_mean
        assert small.cost_frac <= large.cost_frac
        assert small.macs_frac <= large.macs_frac


@every_variant
@every_case
def test_a_set_holds_the_pinned_tokens_and_at_most_as_many_others_as_asked(
    estimator: Estimator, kind: str
) -> None:
    case = CASES[kind]()
    num_pinned = len(case.pinned_ids)
    for cell in case.evaluate([estimator], [1, 3, 8]):
        assert num_pinned <= cell.set_size_mean <= min(num_pinned + cell.size, case.width)


@every_variant
@every_case
def test_sizes_from_the_whole_vocabulary_on_are_the_full_head(
    estimator: Estimator, kind: str
) -> None:
    case = CASES[kind]()
    cells = case.evaluate([estimator], [case.width, case.width + 1, 10_000])
    for cell in cells:
        assert cell.mass == cell.hit_chosen == cell.hit_argmax == 1
        assert cell.neg_log_mass_nats == 0
        assert cell.set_size_mean == case.width
        assert cell.nll_backoff == cell.nll_full
        # There are no more candidates to name than tokens.
        assert replace(cell, size=case.width) == cells[0]


@every_variant
def test_what_naming_candidates_costs_is_declared_and_not_negative(estimator: Estimator) -> None:
    head = make_case().head
    small, large = estimator.cost(head, 1), estimator.cost(head, 20)
    assert 0 <= small.macs <= large.macs
    assert 0 <= small.bytes <= large.bytes


@dataclass(frozen=True)
class Peek(CausalEstimator):
    """Base of estimators that break the rules: the suite has to see it."""

    name: ClassVar[str] = "peek"

    def cost(self, head: Head, size: int) -> Cost:
        return Cost()


class PeekAtLaterStates(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(hidden=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        shift = int(view.hidden_SE[-1].argmax())
        return ((torch.arange(limit) + shift) % limit).expand(view.num_steps, -1)


class PeekAtLaterTokens(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(tokens=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        shift = int(view.token_ids(view.num_steps - 1)[-1])
        return ((torch.arange(limit) + shift) % limit).expand(view.num_steps, -1)


class PeekAtLaterRuns(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(previous=4)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        *_, last_NM = view.previous_top()
        return last_NM[-1, :limit].expand(view.num_steps, -1)


@pytest.mark.parametrize("peek", [PeekAtLaterStates(), PeekAtLaterTokens(), PeekAtLaterRuns()])
def test_the_suite_sees_an_estimator_that_reads_a_later_step_of_its_block(peek: Any) -> None:
    with pytest.raises(AssertionError):
        assert_no_look_ahead(peek, make_case(3))
