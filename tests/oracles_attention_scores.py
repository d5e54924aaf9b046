"""Slow, obvious twins of the scores by position and by attention, past and future."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from tests.oracles import reduce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.oracles import SlowLayer, SlowScore

Row = dict[int, float]


def mirrored_scores(cache: SlowLayer, group: int) -> Row:
    """Score of ``sinkuniform``: minus the position, its 24 bits read backwards."""
    return {j: -float(int(f"{j:024b}"[::-1], 2)) for j in cache.held[group]}


def odd_scores(cache: SlowLayer, group: int) -> Row:
    """Score of ``keepodd``: odd positions before even ones, the newest of each first."""
    return {j: float(j) + (1e6 if j % 2 else 0.0) for j in cache.held[group]}


def last_scores(cache: SlowLayer, group: int) -> Row:
    """Score of ``tova``: the newest row's attention, mean over all heads of the layer."""
    size, num_heads = cache.layer.group_size, cache.layer.num_heads
    rows = [cache.attention(h, cache.seen - 1, cache.held[h // size]) for h in range(num_heads)]
    return {j: sum(row.get(j, 0.0) for row in rows) / num_heads for j in cache.held[group]}


def observed_scores(how: str) -> SlowScore:
    """Score of ``observed``: attention received so far over the rows that could see the key."""

    def score(cache: SlowLayer, group: int) -> Row:
        heads = cache.heads_of(group)
        scores = {}
        for j in cache.held[group]:
            total = sum(reduce([row[h].get(j, 0.0) for h in heads], how) for row in cache.log)
            scores[j] = total / (cache.seen - j)
        return scores

    return score


def persistence_scores(history: int) -> SlowScore:
    """Score of ``scissorhands``: minus the last rows that gave a key less than an even share."""

    def score(cache: SlowLayer, group: int) -> Row:
        heads = cache.heads_of(group)
        low = dict.fromkeys(cache.held[group], 0)
        for q in range(max(0, cache.seen - history), cache.seen):
            for h in heads:
                row = cache.attention(h, q, cache.held[group])
                for j, a in row.items():
                    low[j] += bool(np.float32(a) < np.float32(1 / len(row)))
        return {j: -count / len(heads) for j, count in low.items()}

    return score


def redundancy_scores(round_tokens: int, rounds: int, deep_layer: int) -> SlowScore:
    """Score of ``redundancy``: log of exp(z of reads a row) * agreement / (1 + rounds unread)."""

    def score(cache: SlowLayer, group: int) -> Row:
        held, heads = sorted(cache.held[group]), cache.heads_of(group)
        reads, unread = {}, {}
        for j in held:
            readers = [
                t
                for t, row in enumerate(cache.log)
                if any(is_read(row[h].get(j, 0.0), t + 1) for h in heads)
            ]
            reads[j] = len(readers) / (cache.seen - j)
            unread[j] = (cache.seen - max([j, *readers]) - 1) // round_tokens
        z, agreement = standardised(reads), agreements(cache, held, list(heads))
        scores = {
            j: z[j] + math.log(max(agreement[j], 1e-6)) - math.log(1 + unread[j]) for j in held
        }
        if 0 <= deep_layer <= cache.layer.index:
            span = max(scores.values()) - min(scores.values()) + 1
            scores = {j: s + span * (unread[j] < rounds) for j, s in scores.items()}
        return scores

    return score


def is_read(weight: float, num_seen: int) -> bool:
    """Return whether a weight is above an even share by more than rounding."""
    return weight * num_seen > 1 + 1e-6


def standardised(values: Row) -> Row:
    """Return (value - mean) / standard deviation, 0 if all are equal."""
    if len(set(values.values())) == 1:
        return dict.fromkeys(values, 0.0)
    mean = sum(values.values()) / len(values)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values.values()) / len(values))
    return {j: (x - mean) / deviation for j, x in values.items()}


def agreements(cache: SlowLayer, held: list[int], heads: list[int]) -> Row:
    """Return 1 - |rank - rank'| / (held - 1), mean over pairs of heads, by attention received."""
    pairs = list(combinations(heads, 2))
    if not pairs or len(held) == 1:
        return dict.fromkeys(held, 1.0)
    ranks = {}
    for h in heads:
        worth = {j: np.float32(sum(row[h].get(j, 0.0) for row in cache.log)) for j in held}
        ranks[h] = {j: rank(x, list(worth.values())) for j, x in worth.items()}
    found = {}
    for j in held:
        difference = sum(abs(ranks[h][j] - ranks[other][j]) for h, other in pairs)
        found[j] = 1 - difference / len(pairs) / (len(held) - 1)
    return found


def rank(value: float, values: list[float]) -> float:
    """Return how many are smaller, and half of how many others are equal."""
    return sum(x < value for x in values) + (sum(x == value for x in values) - 1) / 2


def future_attention_scores(cache: SlowLayer, group: int) -> Row:
    """Score of ``oracle``: attention of later rows over what is held and what comes, mean of heads."""
    total = dict.fromkeys(cache.held[group], 0.0)
    for row in later_rows(cache, group):
        for j in total:
            total[j] += row.get(j, 0.0) / len(cache.heads_of(group))
    return total


def future_error_scores(cache: SlowLayer, group: int) -> Row:
    """Score of ``oracle_error``: squared change of each later output when a key leaves it."""
    total = dict.fromkeys(cache.held[group], 0.0)
    for row in later_rows(cache, group):
        keys = list(row)
        weights, values = np.array(list(row.values())), cache.value_GTD[group, keys]
        sink = 0.0 if cache.layer.sinks is None else max(0.0, 1 - weights.sum())
        for at, j in enumerate(keys):
            if j in total:
                others = np.where(np.arange(len(keys)) == at, 0.0, weights)
                without = others @ values / max(others.sum() + sink, 1e-9)
                moved = float(((without - values[at]) ** 2).sum())
                size = float((without**2).sum() + (values[at] ** 2).sum())
                total[j] += weights[at] ** 2 * moved if moved > 1e-12 * size else 0.0
    return total


def later_rows(cache: SlowLayer, group: int) -> Iterator[Row]:
    """Yield each later row of each head of the group over what is held now and what comes."""
    for t in range(cache.seen, cache.key_GTD.shape[1]):
        for h in cache.heads_of(group):
            yield cache.attention(h, t, sorted(cache.held[group]) + list(range(cache.seen, t + 1)))


def influence_scores(cache: SlowLayer, group: int) -> Row:
    """Score of ``influence``: squared effects of each key's absence, a block of 16 rows at a time."""
    held, num_rows = sorted(cache.held[group]), cache.key_GTD.shape[1]
    harm = dict.fromkeys(held, 0.0)
    for gradient_HTD in cache.influence_PHTD:
        for start in range(cache.seen, num_rows, 16):
            moved, bound = dict.fromkeys(held, 0.0), dict.fromkeys(held, 0.0)
            for t in range(start, min(start + 16, num_rows)):
                for h in cache.heads_of(group):
                    row = cache.attention(h, t, held + list(range(cache.seen, t + 1)))
                    gradient_D, output_D = gradient_HTD[h, t], cache.output(row, group)
                    for j in held:
                        a, value_D = min(row.get(j, 0.0), 1 - 1e-6), cache.value_GTD[group, j]
                        change_D = a / (1 - a) * (output_D - value_D)
                        moved[j] += float(gradient_D @ change_D)
                        size = np.linalg.norm(output_D) + np.linalg.norm(value_D)
                        bound[j] += a / (1 - a) * float(np.linalg.norm(gradient_D) * size)
            for j in held:
                # What rounding alone can make counts as nothing.
                if abs(moved[j]) > 1e-10 * bound[j]:
                    harm[j] += moved[j] ** 2 / len(cache.influence_PHTD)
    return harm
