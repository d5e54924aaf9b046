"""What every estimator keeps to, whoever wrote it: one suite over the registry."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.vocab.cases import Case, make_case
from tracekit.errors import UsageError
from tracekit.vocab import engine
from tracekit.vocab.estimator import ESTIMATORS, Estimator, parse_estimator
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.previous import Previous

NAMES = ESTIMATORS.names()
CAUSAL = [name for name in NAMES if ESTIMATORS.get(name).causal]


def test_the_registry_holds_these_estimators() -> None:
    assert {"frequency", "lowrank", "oracle", "previous"} <= set(NAMES)
    assert [name for name in NAMES if name not in CAUSAL] == ["oracle"]


@pytest.mark.parametrize("name", NAMES)
def test_text_is_an_identity_that_parses_back(name: str) -> None:
    estimator = parse_estimator(name)
    assert estimator.name == name
    assert parse_estimator(estimator.text) == estimator
    values = {one.name: 5 for one in fields(estimator)}  # type: ignore[arg-type]
    other = ESTIMATORS.get(name)(**values)
    assert parse_estimator(other.text) == other
    assert (other == estimator) == (not values)
    assert type(estimator).__doc__


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_parameters_survive_their_text(rank: int, top: int) -> None:
    assert parse_estimator(f"lowrank:rank={rank}") == LowRank(rank=rank)
    assert parse_estimator(f" previous: top = {top} ") == Previous(top=top)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lowrnk", "did you mean 'lowrank'"),
        ("lowrank:rnk=3", "did you mean 'rank'"),
        ("oracle:rank=3", "parameter of oracle"),
        ("oracle:", "parameter of oracle"),
        ("lowrank:rank", "whole number"),
        ("lowrank:rank=-3", "whole number"),
        ("lowrank:rank=3,rank=4", "once"),
        ("lowrank:rank=0", "at least 1"),
        ("previous:top=0", "at least 1"),
    ],
)
def test_a_wrong_text_is_refused_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_estimator(text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [1, 5, 23])
def test_a_ranking_holds_distinct_tokens_and_no_more_than_asked(name: str, limit: int) -> None:
    case = make_case()
    for row in case.candidates(parse_estimator(name), limit):
        assert len(row) == len(set(row)) <= limit
        assert all(0 <= i < case.width for i in row)


@pytest.mark.parametrize("name", NAMES)
def test_a_smaller_ranking_is_a_prefix_of_a_larger_one(name: str) -> None:
    case, estimator = make_case(1), parse_estimator(name)
    large = case.candidates(estimator, 20)
    for limit in (1, 7):
        small = case.candidates(estimator, limit)
        assert small == [row[:limit] for row in large]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_steps_change_no_ranking(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, estimator = make_case(2, scored=[2, 3, 6, 7, 8]), parse_estimator(name)
    whole = case.candidates(estimator, 23)
    monkeypatch.setattr(engine, "BLOCK_NUMBERS", 2 * case.width)
    assert case.candidates(estimator, 23) == whole


def changed_after(case: Case, row: int) -> Case:
    """Return the case with all hidden states and tokens after a row replaced."""
    hidden_TE, ids_T = case.hidden_TE.clone(), case.token_ids_T.clone()
    hidden_TE[row + 1 :] = -3 * hidden_TE[row + 1 :].flip(1)
    ids_T[row + 1 :] = (ids_T[row + 1 :] + 1) % case.width
    return case.but(hidden_TE=hidden_TE, token_ids_T=ids_T)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_candidate_up_to_a_step_depends_on_what_comes_after(name: str) -> None:
    case, estimator = make_case(3), parse_estimator(name)
    before = case.candidates(estimator, 20)
    for step, row in enumerate(case.scored_S.tolist()):
        after = changed_after(case, row).candidates(estimator, 20)
        assert after[: step + 1] == before[: step + 1]


@pytest.mark.parametrize("name", CAUSAL)
def test_no_causal_candidate_depends_on_the_logits_of_its_own_step(name: str) -> None:
    case, estimator = make_case(4), parse_estimator(name)
    for block in engine.blocks(**case.shared, num_top=estimator.needs.previous):
        ids_SK = estimator.candidates(block.known, block.logits_SV, 20)
        other_SK = estimator.candidates(block.known, -block.logits_SV, 20)
        assert torch.equal(ids_SK, other_SK)


@pytest.mark.parametrize("name", NAMES)
def test_no_estimator_covers_more_than_the_oracle(name: str) -> None:
    sizes = [1, 2, 5, 10, 20]
    for seed in range(5):
        case = make_case(seed)
        bound = case.evaluate([parse_estimator("oracle")], sizes)
        for cell, best in zip(case.evaluate([parse_estimator(name)], sizes), bound, strict=True):
            assert cell.mass <= best.mass + 1e-12
            assert cell.hit_argmax <= best.hit_argmax == 1


@pytest.mark.parametrize("name", NAMES)
def test_larger_sets_cover_no_less_and_cost_no_less(name: str) -> None:
    cells = make_case(5).evaluate([parse_estimator(name)], [1, 3, 8, 15, 23])
    for small, large in itertools.pairwise(cells):
        assert small.mass <= large.mass
        assert small.neg_log_mass_nats >= large.neg_log_mass_nats
        assert small.hit_chosen <= large.hit_chosen
        assert small.cost_frac <= large.cost_frac
        assert small.macs_frac <= large.macs_frac


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [23, 24, 10_000])
def test_a_size_of_the_whole_vocabulary_is_the_full_head(name: str, size: int) -> None:
    case = make_case(6)
    (cell,) = case.evaluate([parse_estimator(name)], [size])
    assert cell.size == size
    assert cell.mass == cell.hit_chosen == cell.hit_argmax == 1
    assert cell.neg_log_mass_nats == 0
    assert cell.set_size_mean == case.width
    assert cell.nll_backoff == cell.nll_full


@pytest.mark.parametrize("name", NAMES)
def test_what_naming_candidates_costs_is_declared_and_not_negative(name: str) -> None:
    estimator: Estimator = parse_estimator(name)
    head = make_case().head
    small, large = estimator.cost(head, 1), estimator.cost(head, 20)
    assert 0 <= small.macs <= large.macs
    assert 0 <= small.bytes <= large.bytes
