"""Slow twins of clusters, clustered candidates and bounds: loops over definitions, float64.

They import nothing of the package.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def norm(row: Sequence[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in row))


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def centroid(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean of rows, as float32."""
    return [float(np.float32(math.fsum(column) / len(rows))) for column in zip(*rows, strict=True)]


def radius(rows: Sequence[Sequence[float]], center: Sequence[float]) -> float:
    return max(norm([x - c for x, c in zip(row, center, strict=True)]) for row in rows)


def longest_first(rows: Sequence[Sequence[float]], ids: Sequence[int]) -> list[int]:
    return sorted(ids, key=lambda i: (-norm(rows[i]), i))


def groups(labels: Sequence[int]) -> list[list[int]]:
    """Ids by label, labels in order."""
    return [[i for i, one in enumerate(labels) if one == label] for label in sorted(set(labels))]


def clustered_scores(
    rows: Sequence[Sequence[float]],
    bias: Sequence[float] | None,
    hidden: Sequence[float],
    lists: Sequence[Sequence[int]],
) -> list[float]:
    """Return h . c plus the mean bias of the tokens that are not masked, for each list."""
    scores = []
    for ids in lists:
        score = dot(hidden, centroid([rows[i] for i in ids]))
        if bias is not None:
            there = [bias[i] for i in ids if math.isfinite(bias[i])]
            score += math.fsum(there) / len(there) if there else -math.inf
        scores.append(score)
    return scores


def clustered_ranking(
    rows: Sequence[Sequence[float]], scores: Sequence[float], lists: Sequence[Sequence[int]]
) -> list[int]:
    """Members of the lists, best list first, in each the longest row first."""
    order = sorted(range(len(lists)), key=lambda j: (-scores[j], j))
    return [i for j in order for i in longest_first(rows, lists[j])]


def cluster_bound(
    rows: Sequence[Sequence[float]],
    bias: Sequence[float] | None,
    hidden: Sequence[float],
    lists: Sequence[Sequence[int]],
    inside: set[int],
) -> float:
    """Largest bound on a logit over lists that are not wholly inside, -inf if all are."""
    bounds = [-math.inf]
    for ids in lists:
        if not set(ids) <= inside:
            members = [rows[i] for i in ids]
            center = centroid(members)
            reach = norm(hidden) * radius(members, center)
            most = 0.0 if bias is None else max(bias[i] for i in ids)
            bounds.append(dot(hidden, center) + reach + most)
    return max(bounds)


def lowrank_bound(
    rows: np.ndarray, hidden: np.ndarray, axes: np.ndarray, outside: Sequence[int]
) -> float:
    """Largest preview + |h'| |w'| over tokens outside, by exact orthonormal axes [E, R]."""
    bounds = [-math.inf]
    for i in outside:
        preview = (rows[i] @ axes) @ (hidden @ axes)
        rest_row = rows[i] - axes @ (rows[i] @ axes)
        rest_state = hidden - axes @ (hidden @ axes)
        bounds.append(preview + np.linalg.norm(rest_row) * np.linalg.norm(rest_state))
    return float(max(bounds))
