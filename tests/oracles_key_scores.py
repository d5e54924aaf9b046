"""Slow, obvious twins of the scores that are made of keys, values and queries: loops, float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tests.oracles import pooled, received_scores

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


def value_attention_scores(how: str) -> SlowScore:
    """Score of ``vatp``: attention received so far times the sum of the value's magnitudes."""

    def score(cache: SlowLayer, group: int) -> Scores:
        received = received_scores(how)(cache, group)
        return {j: a * sum(abs(x) for x in cache.value_GTD[group, j]) for j, a in received.items()}

    return score


def caote_scores(window: int) -> SlowScore:
    """Score of ``caote``: how far outputs move if a key is not there; nearly none is none."""

    def moved(cache: SlowLayer, group: int, head: int, row: int, j: int) -> float:
        keys, value = cache.held[group], cache.value_GTD[group]
        without = cache.output(cache.attention(head, row, keys - {j}), group)
        length = math.sqrt(sum((without - value[j]) ** 2))
        largest = max(math.sqrt(sum(value[i] ** 2)) for i in keys)
        weight = cache.attention(head, row, keys).get(j, 0.0)
        return weight * length if length > 1e-6 * largest else 0.0

    def score(cache: SlowLayer, group: int) -> Scores:
        rows = range(max(0, cache.seen - window), cache.seen)
        cells = [(head, row) for head in cache.heads_of(group) for row in rows]
        return {
            j: sum(moved(cache, group, *cell, j) for cell in cells) / len(cells)
            for j in cache.held[group]
        }

    return score


def r_kv_scores(window: int, kernel: int, mix: float, threshold: float) -> SlowScore:
    """Score of ``rkv``: pooled attention of the last rows less likeness to other keys."""

    def importance(cache: SlowLayer, group: int, past: list[int]) -> list[float]:
        rows = []
        for q in range(max(0, cache.seen - window), cache.seen):
            logits = [[logit(cache, h, q, j) for j in past] for h in cache.heads_of(group)]
            rows.append(softmax([max(column) for column in zip(*logits, strict=True)]))
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        return pooled(means, kernel, "max")

    def redundancy(cache: SlowLayer, group: int, keys: list[int]) -> dict[int, float]:
        units = {j: unit(cache.key_GTD[group, j]) for j in keys}
        total = dict.fromkeys(keys, 0.0)
        for i in keys:
            cosine = {j: float(units[i] @ units[j]) for j in keys if j != i}
            alike = [j for j, x in cosine.items() if np.float32(x) > np.float32(threshold)]
            for j, x in cosine.items():
                total[j] += 0.0 if alike and j == max(alike) else x
        means = [total[j] / len(keys) for j in keys]
        return dict(zip(keys, softmax(means), strict=True))

    def score(cache: SlowLayer, group: int) -> Scores:
        keys = sorted(cache.held[group])
        past = [j for j in keys if j < cache.seen - window]
        scores = dict.fromkeys(keys, math.inf)
        if past:
            found, like = importance(cache, group, past), redundancy(cache, group, keys)
            scores |= {j: mix * x - (1 - mix) * like[j] for j, x in zip(past, found, strict=True)}
        return scores

    return score


def logit(cache: SlowLayer, head: int, row: int, key: int) -> float:
    """Return one attention logit."""
    layer = cache.layer
    x = layer.scale * float(
        cache.query_HTD[head, row] @ cache.key_GTD[head // layer.group_size, key]
    )
    if layer.softcap is not None:
        x = layer.softcap * math.tanh(x / layer.softcap)
    return x


def leverages(
    cache: SlowLayer, group: int, keys: list[int], ridge: float, draw: np.ndarray
) -> Scores:
    """Return the leverage of each of some keys among them, all of them projected by ``draw``."""
    if not keys:
        return {}
    size = cache.key_GTD.shape[-1]
    rows = {j: turn(-j, size) @ cache.key_GTD[group, j] @ draw for j in keys}
    mean = sum(rows.values()) / len(rows)
    gram = ridge * np.eye(draw.shape[1])
    for row in rows.values():
        gram = gram + np.outer(row - mean, row - mean)
    return {j: float((x - mean) @ np.linalg.solve(gram, x - mean)) for j, x in rows.items()}


def projection(cache: SlowLayer, group: int, sketch: int, seed: int) -> np.ndarray:
    """Return what keys are multiplied by: a drawn matrix, or the unit matrix."""
    size = cache.key_GTD.shape[-1]
    if not sketch:
        return np.eye(size)
    draw = np.random.default_rng((seed, cache.layer.index, group))
    return draw.standard_normal((size, sketch)) / math.sqrt(sketch)


def leverage_scores(sketch: int, ridge: float, seed: int) -> SlowScore:
    """Score of ``leverage``."""

    def score(cache: SlowLayer, group: int) -> Scores:
        draw = projection(cache, group, sketch, seed)
        return leverages(cache, group, sorted(cache.held[group]), ridge, draw)

    return score


def chunk_attention(cache: SlowLayer, group: int, keys: list[int], chunk: int) -> Scores:
    """Return what each of some keys receives in its chunk, times its value's norm, pooled."""
    received = dict.fromkeys(keys, 0.0)
    heads = cache.heads_of(group)
    for at in range(0, len(keys), chunk):
        part = keys[at : at + chunk]
        for h in heads:
            for q in part:
                row = [float(cache.query_HTD[h, q] @ cache.key_GTD[group, j]) for j in part]
                for j, weight in zip(part, softmax(row), strict=True):
                    received[j] += weight / len(heads)
    norms = [math.sqrt(sum(cache.value_GTD[group, j] ** 2)) for j in keys]
    line = [received[j] * norm for j, norm in zip(keys, norms, strict=True)]
    return dict(zip(keys, pooled(line, 3, "avg"), strict=True))


def non_causal_scores(chunk: int) -> SlowScore:
    """Score of ``noncausal``."""

    def score(cache: SlowLayer, group: int) -> Scores:
        return chunk_attention(cache, group, sorted(cache.held[group]), chunk)

    return score


def standardised(scores: list[Scores]) -> list[Scores]:
    """Return scores of all heads less their common mean, over their common deviation."""
    values = [x for one in scores for x in one.values()]
    mean = sum(values) / max(len(values), 1)
    variance = sum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1)
    deviation = max(math.sqrt(variance), 1e-6)
    return [{j: (x - mean) / deviation for j, x in one.items()} for one in scores]


def compactor_scores(
    sinks: int, newest: int, blend: float, chunk: int, sketch: int, ridge: float, seed: int
) -> SlowScore:
    """Score of ``compactor``: both of the above, standardised over the heads of the layer."""

    def score(cache: SlowLayer, group: int) -> Scores:
        inner = [
            [j for j in sorted(held) if sinks <= j < cache.seen - newest] for held in cache.held
        ]
        draws = [projection(cache, g, sketch, seed) for g in range(len(inner))]
        lever = standardised(
            [leverages(cache, g, keys, ridge, draws[g]) for g, keys in enumerate(inner)]
        )
        heard = standardised(
            [chunk_attention(cache, g, keys, chunk) for g, keys in enumerate(inner)]
        )
        return dict.fromkeys(cache.held[group], math.inf) | {
            j: round(blend * lever[group][j] + heard[group][j], 6) for j in inner[group]
        }

    return score
