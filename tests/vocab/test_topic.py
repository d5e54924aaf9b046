"""Topics of hidden states against a plain, slow version of their formula."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_topics as slow
from tests.vocab.cases import Case, make_case
from tracekit.errors import UsageError
from tracekit.measure.leader import Leaders
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.estimator import parse_estimator
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.topic import Topic
from tracekit.vocab.scheme import parse_scheme

SEEDS = st.integers(0, 10**6)
KINDS = st.sampled_from(["past", "hidden"])
SHARES = st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.8, 1.0])


def moved(case: Case, hidden_TE: torch.Tensor) -> Case:
    return case.but(own=case.own.but(hidden_TE=hidden_TE))


def joined(
    hidden_TE: torch.Tensor, threshold: float, decay: float
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return for each row the means nearest to it and joined by it, and the clusters before it."""
    leaders = Leaders(hidden_TE.shape[1], threshold=threshold, decay=decay)
    nearest, means, before = [], [], []
    for state_E in hidden_TE.double().numpy():
        before.append(leaders.num_clusters)
        nearest.append(leaders.nearest(state_E))
        means.append(leaders.join(state_E))
    return np.stack(nearest), np.stack(means), before


@settings(max_examples=60, deadline=None)
@given(SEEDS, SHARES, SHARES, st.integers(1, 40), st.integers(2, 6))
def test_leaders_are_the_means_of_their_members(
    seed: int, threshold: float, decay: float, num_rows: int, size: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    # In one dimension all cosines are 1 or -1: which cluster is nearest would be up to rounding.
    hidden_TE = torch.randn(num_rows, size, generator=rng) + 2
    nearest, means, before = joined(hidden_TE, threshold, decay)
    past, hidden, wanted = slow.topics(hidden_TE.double().tolist(), threshold, decay)
    assert before == wanted
    np.testing.assert_allclose(means, hidden, rtol=1e-9, atol=1e-12)
    assert np.isnan(nearest[0]).all()
    for mean_E, one in zip(nearest[1:], filter(None, past), strict=True):
        np.testing.assert_allclose(mean_E, one, rtol=1e-9, atol=1e-12)


def test_leaders_of_two_directions_are_two_whatever_the_states_share() -> None:
    rng = torch.Generator().manual_seed(1)
    way_T = torch.arange(60) % 2 * 2.0 - 1
    hidden_TE = torch.randn(60, 8, generator=rng) * 0.01 + 50
    hidden_TE[:, 0] += 5 * way_T
    nearest, means, before = joined(hidden_TE, 0.5, 0.0)
    assert before[2:] == [2] * 58
    np.testing.assert_allclose(means[-1, 0], 55, atol=0.01)
    np.testing.assert_allclose(means[-2, 0], 45, atol=0.01)
    np.testing.assert_allclose(nearest[2:, 0], 50 + 5 * way_T[2:], atol=0.02)


def test_states_that_are_all_alike_are_one_cluster() -> None:
    state_E = torch.randn(6, generator=torch.Generator().manual_seed(2))
    nearest, means, before = joined(state_E.expand(30, -1), 1.0, 0.05)
    assert before == [0] + [1] * 29
    for found in (means, nearest[1:]):
        np.testing.assert_allclose(found, np.tile(state_E.double().numpy(), (len(found), 1)))


@settings(max_examples=40, deadline=None)
@given(SEEDS, KINDS, SHARES, SHARES, st.booleans(), st.sets(st.integers(0, 8), min_size=1))
def test_topic_is_the_order_of_the_products_with_the_topic_vector(
    seed: int, of: Any, threshold: float, decay: float, has_bias: bool, scored: set[int]
) -> None:
    case = make_case(seed, has_bias=has_bias, scored=sorted(scored))
    ranked = case.candidates(Topic(of, threshold, decay), case.width)
    past, hidden, _ = slow.topics(case.hidden_TE.double().tolist(), threshold, decay)
    vectors = past if of == "past" else hidden
    bias = [0.0] * case.width if case.head.bias_V is None else case.head.bias_V.tolist()
    for row, ids in zip(sorted(scored), ranked, strict=True):
        vector = vectors[row]
        if vector is None:
            assert ids == []
            continue
        products = [
            slow.dot(weight, vector) + b
            for weight, b in zip(case.head.weight_VE.tolist(), bias, strict=True)
        ]
        # Single precision may swap two products that are closer than its rounding.
        np.testing.assert_allclose([products[i] for i in ids], sorted(products)[::-1], atol=1e-5)
        assert sorted(ids) == list(range(case.width))


def test_with_the_state_itself_a_decay_of_1_is_the_head() -> None:
    case = make_case(3, has_bias=True)
    assert case.candidates(Topic("hidden", decay=1.0), 23) == case.candidates(Oracle(), 23)


def test_one_earlier_state_is_the_topic_whatever_the_threshold() -> None:
    case = make_case(10, scored=[0, 1])
    first = case.but(own=case.own.but(scored_S=torch.tensor([0])))
    for threshold in (0.0, 1.0):
        ranked = case.candidates(Topic(threshold=threshold), 23)
        assert ranked == [[], *first.candidates(Oracle(), 23)]


def test_states_that_are_all_alike_have_the_order_of_their_own_logits() -> None:
    case = make_case(4, num_rows=12, scored=[11])
    hidden_TE = case.hidden_TE[:1] + torch.zeros(12, 1)
    alike = moved(case, hidden_TE)
    for topic in (Topic("past", threshold=0.0), Topic("hidden", threshold=0.0)):
        assert alike.candidates(topic, 23) == alike.candidates(Oracle(), 23)


@pytest.mark.parametrize("of", ["past", "hidden"])
def test_rows_between_scored_steps_and_before_them_count(of: Any) -> None:
    case = make_case(5, scored=[3, 8])
    topic = Topic(of, threshold=0.0, decay=0.0)
    whole = case.candidates(topic, 23)
    for row, step in ((1, 0), (6, 1)):
        hidden_TE = case.hidden_TE.clone()
        hidden_TE[row] = -5 * hidden_TE[row]
        assert moved(case, hidden_TE).candidates(topic, 23)[step] != whole[step]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_block_goes_on_where_the_last_one_ended(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(6, num_rows=40, scored=[5, 6, 9, 20, 21, 39])
    kinds: tuple[Any, ...] = ("past", "hidden")
    topics = [Topic(*one) for one in itertools.product(kinds, (0.1, 0.5), (0.0, 0.3))]
    whole = [case.candidates(one, 23) for one in topics]
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", rows * case.width)
    assert [case.candidates(one, 23) for one in topics] == whole


@pytest.mark.parametrize(("of", "searches"), [("past", 2), ("hidden", 1)])
def test_it_costs_its_searches_of_the_clusters_and_the_whole_head(of: Any, searches: int) -> None:
    case = make_case(7, has_bias=True)
    (cell,) = case.evaluate([Topic(of)], [4])
    *_, before = slow.topics(case.hidden_TE.double().tolist(), 0.5, 0.05)
    clusters = sum(before[row] for row in case.scored_S.tolist()) / len(case.scored_S) * searches
    assert cell["macs"] == pytest.approx(23 * 6 + 2 * clusters * 6)
    assert cell["bytes"] == pytest.approx(4 * (23 * 7 + clusters * 6))


def test_two_topics_in_a_union_keep_apart_what_they_remember() -> None:
    case = make_case(8, num_rows=30)
    union = parse_scheme("topic:threshold=0.1+topic:threshold=0.9").estimator
    ranked = [case.candidates(Topic(threshold=threshold), 23) for threshold in (0.1, 0.9)]
    wanted = [
        list(dict.fromkeys(itertools.chain(*zip(*pair, strict=True))))
        for pair in zip(*ranked, strict=True)
    ]
    assert case.candidates(union, 23) == wanted


@pytest.mark.parametrize("text", ["topic:threshold=1.5", "topic:decay=2", "topic:threshold=-0.1"])
def test_a_share_out_of_0_to_1_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="from 0"):
        parse_estimator(text)
