"""Clusters of rows against loops over their definitions, and the same bytes every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from tests import oracles_clusters as slow
from tracekit.measure.clusters import Clusters, cluster_rows

SEEDS = st.integers(0, 10**6)


def rows_of(seed: int, num_rows: int = 23, size: int = 6) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_said_of_clusters_is_true_of_their_members(
    seed: int, num: int, dtype: torch.dtype
) -> None:
    weight_VE = rows_of(seed).to(dtype)
    found = cluster_rows(weight_VE, num, seed)
    rows, lists = weight_VE.tolist(), slow.groups(found.cluster_V.tolist())
    assert len(lists) == len(found.size_J) <= num
    assert found.size_J.tolist() == [len(ids) for ids in lists]
    centroids = [slow.centroid([rows[i] for i in ids]) for ids in lists]
    np.testing.assert_allclose(found.centroid_JE.numpy(), centroids, rtol=1e-6, atol=1e-7)
    radii = [
        slow.radius([rows[i] for i in ids], center)
        for ids, center in zip(lists, found.centroid_JE.tolist(), strict=True)
    ]
    np.testing.assert_allclose(found.radius_J.numpy(), radii, rtol=1e-12, atol=1e-12)
    assert found.members_V.tolist() == [i for ids in lists for i in slow.longest_first(rows, ids)]


def test_clusters_that_are_far_apart_are_found() -> None:
    label_V = torch.arange(60) % 5
    weight_VE = 100 * torch.eye(5, 6)[label_V] + rows_of(1, 60)
    found = cluster_rows(weight_VE, 5, 0)
    pairs = set(zip(label_V.tolist(), found.cluster_V.tolist(), strict=True))
    assert len(pairs) == len(found.size_J) == 5


@pytest.mark.parametrize("num", [3, 4, 99])
def test_no_more_clusters_are_made_than_there_are_distinct_rows(num: int) -> None:
    distinct_DE = rows_of(2, 3)
    distinct_DE[0, 0] = 0.0
    weight_VE = distinct_DE[torch.arange(12) % 3]
    weight_VE[3, 0] = -0.0
    found = cluster_rows(weight_VE, num, 0)
    assert found.size_J.tolist() == [4, 4, 4]
    assert found.radius_J.tolist() == [0, 0, 0]
    assert (found.cluster_V.view(4, 3) == found.cluster_V[:3]).all()


def test_rows_that_differ_by_rounding_alone_are_clustered_without_a_warning() -> None:
    weight_VE = torch.full((20, 6), 1000.0)
    weight_VE[:, 0] += torch.arange(20) * 1e-4
    found = cluster_rows(weight_VE, 7, 0)
    assert 1 <= len(found.size_J) <= 7
    assert int(found.size_J.sum()) == 20


def test_a_seed_gives_the_same_bytes_with_any_number_of_threads() -> None:
    weight_VE = rows_of(3, 3000, 16)
    with threadpool_limits(1):
        one = cluster_rows(weight_VE, 40, 7)
    with threadpool_limits(4):
        four = cluster_rows(weight_VE, 40, 7)
    assert (one.cluster_V == four.cluster_V).all()
    assert (one.centroid_JE == four.centroid_JE).all()
    other = cluster_rows(weight_VE, 40, 8)
    assert (one.cluster_V != other.cluster_V).any()


def test_labels_that_no_row_has_are_passed_over() -> None:
    found = Clusters.of(rows_of(4, 4), torch.tensor([7, 2, 7, 2]))
    assert found.cluster_V.tolist() == [1, 0, 1, 0]
    assert found.size_J.tolist() == [2, 2]
