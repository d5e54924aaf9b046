"""Slow twins of topics and learned screening: loops over formulas, float64.

They import nothing of the package.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.oracles_vocab import order, softmax

if TYPE_CHECKING:
    from collections.abc import Sequence

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def mean(vectors: Sequence[Vector]) -> Vector:
    return [math.fsum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def less(a: Vector, b: Vector) -> Vector:
    return [x - y for x, y in zip(a, b, strict=True)]


def cosine(a: Vector, b: Vector) -> float:
    length = math.sqrt(dot(a, a) * dot(b, b))
    return dot(a, b) / length if length else 1.0


def faded_mean(members: Sequence[Vector], decay: float) -> Vector:
    """Mean of a cluster from all of its members: each weighs at least ``decay`` when it comes."""
    found = members[0]
    for n, member in enumerate(members[1:], 2):
        weight = max(1 / n, decay)
        found = [(1 - weight) * x + weight * y for x, y in zip(found, member, strict=True)]
    return found


def seen_from(
    centre: Vector, state: Vector, clusters: Sequence[Sequence[Vector]], decay: float
) -> list[float]:
    """Cosine of a state and of each cluster's mean, both from a centre."""
    return [cosine(less(faded_mean(one, decay), centre), less(state, centre)) for one in clusters]


def topics(
    states: Sequence[Vector], threshold: float, decay: float
) -> tuple[list[Vector | None], list[Vector], list[int]]:
    """For each state: mean of the nearest cluster before it, of that it joins, clusters before."""
    clusters: list[list[Vector]] = []
    past: list[Vector | None] = []
    hidden, before = [], []
    for row, state in enumerate(states):
        before.append(len(clusters))
        past.append(None)
        if clusters:
            cosines = seen_from(mean(states[:row]), state, clusters, decay)
            past[row] = faded_mean(clusters[cosines.index(max(cosines))], decay)
        cosines = seen_from(mean(states[: row + 1]), state, clusters, decay)
        if cosines and max(cosines) >= threshold:
            own = clusters[cosines.index(max(cosines))]
        else:
            own = []
            clusters.append(own)
        own.append(state)
        hidden.append(faded_mean(own, decay))
    return past, hidden, before


def token_topics(
    tokens: Sequence[int], clusters: Sequence[Sequence[int]], rate: float
) -> list[int]:
    """Ranking after some tokens; ``clusters`` are lists of ids in their order."""
    weights = []
    for members in clusters:
        weight = 0.0
        for token in tokens:
            weight = (1 - rate) * weight + (rate if token in members else 0.0)
        weights.append(weight)
    return [token for cluster in order(weights) for token in clusters[cluster]]


def nearest(state: Vector, centroids: Sequence[Vector]) -> int:
    distances = [dot(less(state, one), less(state, one)) for one in centroids]
    return distances.index(min(distances))


def mean_probabilities(logits: Sequence[Vector]) -> Vector:
    """Mean of the distributions of some examples."""
    return mean([softmax(one) for one in logits])
