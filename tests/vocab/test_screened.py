"""Learned screening against a plain, slow version of its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_topics as slow
from tests.oracles_vocab import order
from tests.vocab.cases import Case, make_case, with_masked
from tracekit.errors import InputError, UsageError
from tracekit.measure.clusters import cluster_rows
from tracekit.measure.head import Head
from tracekit.spec import HeadSpec
from tracekit.vocab.estimator import parse_estimator
from tracekit.vocab.estimators.screened import Screen, Screened

SEEDS = st.integers(0, 10**6)


def examples(case: Case) -> torch.Tensor:
    """Return the contexts of the other prompts, [X, E]."""
    return torch.cat([one.hidden_TE[one.scored_S] for one in case.rest])


def orders(case: Case, num: int) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Return centroids, the mean probabilities of each cluster, and those of all examples."""
    hidden_XE = examples(case)
    cluster_X = cluster_rows(hidden_XE, num, 0).cluster_V.tolist()
    logits = case.head.logits(hidden_XE).tolist()
    states = hidden_XE.double().tolist()
    members = [
        [x for x, one in enumerate(cluster_X) if one == cluster]
        for cluster in range(max(cluster_X) + 1)
    ]
    return (
        [slow.mean([states[x] for x in one]) for one in members],
        [slow.mean_probabilities([logits[x] for x in one]) for one in members],
        slow.mean_probabilities(logits),
    )


def all_ids(ranked: list[list[int]], width: int) -> bool:
    return all(sorted(row) == list(range(width)) for row in ranked)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 30), st.booleans(), st.sampled_from([0.3, 1.0, 3.0]))
def test_screened_is_the_order_of_mean_probability_in_the_nearest_cluster(
    seed: int, num: int, has_bias: bool, spread: float
) -> None:
    case = make_case(seed, has_bias=has_bias, spread=spread)
    centroids, probabilities, _ = orders(case, num)
    ranked = case.candidates(Screened(clusters=num), case.width)
    assert all_ids(ranked, case.width)
    for row, ids in zip(case.scored_S.tolist(), ranked, strict=True):
        wanted = probabilities[slow.nearest(case.hidden_TE[row].double().tolist(), centroids)]
        # Single precision may swap two means that are closer than its rounding.
        np.testing.assert_allclose(
            [wanted[i] for i in ids], sorted(wanted)[::-1], rtol=1e-4, atol=1e-7
        )


def test_ties_in_a_cluster_go_by_all_examples() -> None:
    # A token that no context of a cluster allows has probability 0 there.
    weight_VE = torch.zeros(4, 6)
    weight_VE[2, 0], weight_VE[3, 1] = 1e4, 1e4
    head = Head(weight_VE, None, HeadSpec(num_rows=4, hidden_size=6))
    hidden_XE = torch.tensor([[1.0, 0], [0, 1.0], [0, 1.0], [-1.0, -1.0]])
    screen = Screen.fit(head, torch.nn.functional.pad(hidden_XE, (0, 4)), 4, 0)
    step_SE = torch.nn.functional.pad(torch.tensor([[0.9, 0.1], [0.1, 0.8]]), (0, 4))
    # Of the examples two are of token 3, one is of token 2, and one of tokens 0 and 1 alike.
    ids_SK = screen.order_JV[screen.nearest(step_SE)]
    assert ids_SK.tolist() == [[2, 3, 0, 1], [3, 2, 0, 1]]


def test_one_cluster_is_the_mean_of_all_examples_whatever_the_context() -> None:
    case = make_case(2)
    _, _, overall = orders(case, 1)
    first, *rest = case.candidates(Screened(clusters=1), 23)
    assert first == order(overall)
    assert rest == [first] * len(rest)


def test_as_many_clusters_as_examples_are_their_own_distributions() -> None:
    case = make_case(3)
    hidden_TE = examples(case)[:9]
    alike = case.but(own=case.own.but(hidden_TE=hidden_TE))
    ranked = alike.candidates(Screened(clusters=99), 23)
    logits = case.head.logits(hidden_TE).tolist()
    assert ranked == [order(logits[row]) for row in case.scored_S.tolist()]


def test_one_example_is_one_cluster() -> None:
    case = make_case(4)
    rest = (case.rest[0].but(scored_S=torch.tensor([5])),)
    one = case.but(rest=rest)
    wanted = order(case.head.logits(rest[0].hidden_TE[5:6])[0].tolist())
    assert one.candidates(Screened(), 23) == [wanted] * len(case.scored_S)


def test_examples_that_are_all_alike_make_one_cluster_without_nan() -> None:
    case = make_case(5)
    rest = tuple(one.but(hidden_TE=torch.ones_like(one.hidden_TE)) for one in case.rest)
    alike = case.but(rest=rest)
    wanted = order(case.head.logits(torch.ones(1, 6))[0].tolist())
    assert alike.candidates(Screened(clusters=3), 23) == [wanted] * len(case.scored_S)


def test_masked_tokens_come_last() -> None:
    case = with_masked(make_case(6, has_bias=True), [0, 1, 5])
    ranked = case.candidates(Screened(clusters=3), 23)
    assert all_ids(ranked, 23)
    assert all(set(row[-3:]) == {0, 1, 5} for row in ranked)


def test_nothing_of_the_own_prompt_is_fitted() -> None:
    case = make_case(7)
    loud = make_case(70)
    other = case.but(own=loud.own)
    fitted = [
        Screen.fit(one.head, torch.cat([h for h, _ in one.others.examples()]), 3, 0)
        for one in (case, other)
    ]
    assert torch.equal(fitted[0].order_JV, fitted[1].order_JV)
    assert torch.equal(fitted[0].centroid_JE, fitted[1].centroid_JE)
    # What it learned is applied to the same states: only these may change a ranking.
    same_states = other.but(own=other.own.but(hidden_TE=case.hidden_TE))
    screened = Screened(clusters=3)
    assert same_states.candidates(screened, 23) == case.candidates(screened, 23)


def test_it_costs_its_centroids_and_the_ids_named() -> None:
    cells = make_case(9).evaluate([Screened(clusters=3), Screened()], [7, 1000])
    # Two prompts of five scored steps each.
    assert [(one["macs"], one["bytes"]) for one in cells] == [
        (3 * 6, 4 * (3 * 7 + 7)),
        (3 * 6, 4 * (3 * 7 + 23)),
        (10 * 6, 4 * (10 * 7 + 7)),
        (10 * 6, 4 * (10 * 7 + 23)),
    ]


def test_other_prompts_without_a_step_are_refused() -> None:
    case = make_case(10)
    empty = torch.tensor([], dtype=torch.int64)
    rest = tuple(one.but(scored_S=empty) for one in case.rest)
    with pytest.raises(InputError, match="no other prompt has a decoded step"):
        case.but(rest=rest).candidates(Screened(), 23)


@pytest.mark.parametrize("text", ["screened:clusters=0", "screened:seed=-1"])
def test_no_clusters_and_a_seed_below_0_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be at least"):
        parse_estimator(text)
