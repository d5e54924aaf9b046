"""Slow, obvious twins of the scores that are made of keys, values and queries: loops, float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tests.oracles import pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.oracles import SlowLayer, SlowScore

Scores = dict[int, float]


def softmax(logits: Sequence[float]) -> list[float]:
    """Return exp(x) over the sum of all."""
    peak = max(logits, default=0.0)
    weights = [math.exp(x - peak) for x in logits]
    return [a / sum(weights) for a in weights]


def unit(vector: np.ndarray) -> np.ndarray:
    """Return a vector of length 1, or 0."""
    length = math.sqrt(sum(x * x for x in vector))
    return vector / length if length else vector


def turn(position: float, size: int) -> np.ndarray:
    """Return the matrix that turns a query to a position: its first two numbers, 1 radian each."""
    matrix = np.eye(size)
    if size > 1:
        cos, sin = math.cos(position), math.sin(position)
        matrix[:2, :2] = [[cos, -sin], [sin, cos]]
    return matrix


def key_difference_scores(cache: SlowLayer, group: int) -> Scores:
    """Score of ``keydiff``: minus the cosine to the mean direction."""
    units = {j: unit(cache.key_GTD[group, j]) for j in sorted(cache.held[group])}
    anchor = sum(units.values()) / len(units)
    if math.sqrt(sum(x * x for x in anchor)) < 1e-6:
        return dict.fromkeys(units, 0.0)
    return {j: -round(float(one @ unit(anchor)), 7) for j, one in units.items()}


def lag_scores(sinks: int, lag: int) -> SlowScore:
    """Score of ``lagkv``: rank of the spread in a partition, scaled by the next one."""

    def spreads(entry_TD: np.ndarray, part: list[int], after: list[int]) -> list[float]:
        found = []
        for j in part:
            scaled = []
            for d in range(entry_TD.shape[1]):
                low, high = min(entry_TD[after, d]), max(entry_TD[after, d])
                scaled.append((entry_TD[j, d] - low) / (high - low) if high > low else 0.0)
            mean = sum(scaled) / len(scaled)
            squares = sum((x - mean) ** 2 for x in scaled)
            found.append(math.sqrt(squares / max(len(scaled) - 1, 1)))
        return softmax(found)

    def score(cache: SlowLayer, group: int) -> Scores:
        keys = [j for j in sorted(cache.held[group]) if j >= sinks]
        parts = [keys[at : at + lag] for at in range(0, len(keys) - lag + 1, lag)]
        scores = dict.fromkeys(cache.held[group], 1.0)
        for part, after in pairwise(parts):
            key = spreads(cache.key_GTD[group], part, after)
            value = spreads(cache.value_GTD[group], part, after)
            both = {j: np.float32((k + v) / 2) for j, k, v in zip(part, key, value, strict=True)}
            order = sorted(part, key=lambda j, both=both: (both[j], j))
            scores |= {j: rank / lag for rank, j in enumerate(order)}
        return scores

    return score


def leverage_product_scores(window: int) -> SlowScore:
    """Score of ``cur``: squared norms as shares of their block, key times value."""

    def score(cache: SlowLayer, group: int) -> Scores:
        keys, scores = sorted(cache.held[group]), {}
        for at in range(0, len(keys), window):
            block = keys[at : at + window]
            squares = [
                [sum(x * x for x in entry[group, j]) for j in block]
                for entry in (cache.key_GTD, cache.value_GTD)
            ]
            shares = [[x / sum(one) if sum(one) else 0.0 for x in one] for one in squares]
            scores |= {j: k * v for j, k, v in zip(block, *shares, strict=True)}
        return scores

    return score


def expected_scores(sinks: int, future: int, epsilon: float) -> SlowScore:
    """Score of ``expected``: attention of normal queries, turned by the mean of coming turns."""

    def logits(cache: SlowLayer, head: int, key: np.ndarray) -> np.ndarray:
        size, scale = key.shape[1], cache.layer.scale
        rows = [turn(-t, size) @ cache.query_HTD[head, t] for t in range(sinks, cache.seen)]
        mean = sum(rows) / len(rows)
        covariance = sum(np.outer(q - mean, q - mean) for q in rows) / len(rows)
        coming = range(cache.seen, cache.seen + future)
        mean_turn = sum(turn(t, size) for t in coming) / future
        mean, covariance = mean_turn @ mean, mean_turn @ covariance @ mean_turn.T
        return np.array([scale * k @ mean + scale**2 / 2 * k @ covariance @ k for k in key])

    def score(cache: SlowLayer, group: int) -> Scores:
        scores = dict.fromkeys(cache.held[group], math.inf)
        keys = [j for j in sorted(cache.held[group]) if j >= sinks]
        if not keys:
            return scores
        rows = [
            softmax(logits(cache, head, cache.key_GTD[group, keys]))
            for head in cache.heads_of(group)
        ]
        for j, column in zip(keys, zip(*rows, strict=True), strict=True):
            norm = math.sqrt(sum(x * x for x in cache.value_GTD[group, j]))
            scores[j] = (sum(column) / len(column) + epsilon) * norm
        return scores

    return score
