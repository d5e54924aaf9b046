"""The clustered head against loops over its lists."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_clusters as slow
from tests.vocab.cases import Case, make_case
from tracekit.measure.clusters import cluster_rows
from tracekit.measure.head import Head
from tracekit.vocab.estimators.clustered import SEED, Clustered

Metric = Literal["cosine", "euclidean"]


def lists_of(case: Case, num: int, metric: Metric) -> list[list[int]]:
    weight_VE = case.head.weight_VE.float()
    lengths = weight_VE.norm(dim=1, keepdim=True)
    points_VE = weight_VE / lengths if metric == "cosine" else weight_VE
    return slow.groups(cluster_rows(points_VE, num, SEED).cluster_V.tolist())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 23),
    st.integers(1, 30),
    st.sampled_from(["cosine", "euclidean"]),
    st.booleans(),
)
def test_lists_are_opened_in_the_order_of_their_mean_logit(
    seed: int, limit: int, num: int, metric: Metric, has_bias: bool
) -> None:
    case = make_case(seed, has_bias=has_bias)
    if case.head.bias_V is not None:
        bias_V = case.head.bias_V.clone()
        bias_V[:9] = -torch.inf
        case = case.but(head=Head(case.head.weight_VE, bias_V, case.head.spec))
    rows, lists = case.head.weight_VE.tolist(), lists_of(case, num, metric)
    bias = None if case.head.bias_V is None else case.head.bias_V.tolist()
    ranked = case.candidates(Clustered(lists=num, metric=metric), limit)
    for row, ids in zip(case.scored_S.tolist(), ranked, strict=True):
        scores = slow.clustered_scores(rows, bias, case.hidden_TE[row].tolist(), lists)
        finite = np.sort([one for one in scores if np.isfinite(one)])
        if np.diff(finite).min(initial=1.0) > 1e-4:
            assert ids == slow.clustered_ranking(rows, scores, lists)[:limit]


def test_as_many_lists_as_tokens_are_the_order_of_the_logits() -> None:
    case = make_case(7, has_bias=True)
    logits = case.logits()
    wanted = [
        sorted(range(23), key=lambda i, row=row: -logits[row][i])[:10]
        for row in case.scored_S.tolist()
    ]
    assert case.candidates(Clustered(lists=23, metric="euclidean"), 10) == wanted


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_one_list_is_the_longest_row_first_at_every_step(metric: Metric) -> None:
    case = make_case(8)
    wanted = slow.longest_first(case.head.weight_VE.tolist(), range(23))
    assert case.candidates(Clustered(lists=1, metric=metric), 23) == [wanted] * len(case.scored_S)


def test_the_cost_is_a_product_with_the_centroids_and_the_ids_that_are_opened() -> None:
    case = make_case(9, has_bias=True)
    (row,) = case.evaluate([Clustered(lists=4)], [5])
    assert (row["macs"], row["bytes"]) == (4 * 6, 4 * (6 + 1) * 4 + 5 * 4)
