"""Topics of tokens against a plain, slow version of their formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_topics as slow
from tests.vocab.cases import Case, make_case
from tracekit.errors import UsageError
from tracekit.measure.clusters import cluster_rows
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.estimator import parse_estimator
from tracekit.vocab.estimators.token_topics import TokenTopics

SEEDS = st.integers(0, 10**6)


def clusters_of(case: Case, num: int) -> list[list[int]]:
    """Return the tokens of each cluster, the lower id first."""
    found = cluster_rows(case.head.weight_VE, num, 0)
    return [
        [token for token, one in enumerate(found.cluster_V.tolist()) if one == cluster]
        for cluster in range(len(found.size_J))
    ]


@settings(max_examples=40, deadline=None)
@given(
    SEEDS,
    st.integers(1, 30),
    st.sampled_from([0.0, 0.1, 0.37, 1.0]),
    st.integers(1, 23),
    st.sets(st.integers(0, 8), min_size=1),
)
def test_token_topics_are_the_clusters_by_their_weight(
    seed: int, lists: int, rate: float, limit: int, scored: set[int]
) -> None:
    case = make_case(seed, scored=sorted(scored))
    tokens, clusters = case.token_ids_T.tolist(), clusters_of(case, lists)
    wanted = [
        slow.token_topics(tokens[: row + 1], clusters, rate)[:limit] for row in sorted(scored)
    ]
    assert case.candidates(TokenTopics(lists=lists, rate=rate), limit) == wanted


def test_the_cluster_of_the_newest_token_comes_first_at_a_rate_of_1() -> None:
    case = make_case(1)
    clusters = clusters_of(case, 5)
    for row, ids in zip(
        case.scored_S.tolist(),
        case.candidates(TokenTopics(lists=5, rate=1.0), 23),
        strict=True,
    ):
        (own,) = (one for one in clusters if int(case.token_ids_T[row]) in one)
        assert ids[: len(own)] == own


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_block_goes_on_where_the_last_one_ended(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(2, num_rows=40, scored=[0, 5, 6, 9, 20, 39])
    whole = case.candidates(TokenTopics(lists=6), 23)
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", rows * case.width)
    assert case.candidates(TokenTopics(lists=6), 23) == whole


def test_a_single_prompt_and_its_states_say_nothing() -> None:
    case = make_case(3)
    alone = case.but(rest=(), own=case.own.but(hidden_TE=torch.zeros_like(case.hidden_TE)))
    topics = TokenTopics(lists=4)
    assert alone.candidates(topics, 23) == case.candidates(topics, 23)


def test_it_costs_its_weights_and_the_ids_named() -> None:
    cells = make_case(4).evaluate([TokenTopics(lists=4), TokenTopics(lists=99)], [7, 1000])
    assert [(one["macs"], one["bytes"]) for one in cells] == [
        (4, 4 * (4 + 7)),
        (4, 4 * (4 + 23)),
        (23, 4 * (23 + 7)),
        (23, 4 * (23 + 23)),
    ]


def test_a_rate_above_1_is_refused() -> None:
    with pytest.raises(UsageError, match="rate is a number from 0 to 1"):
        parse_estimator("token_topics:rate=1.5")
