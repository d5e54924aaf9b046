"""Slow, obvious twins of the attention statistics: one row, one key, one set at a time, float64.

A row is a dictionary from the position of a key to its attention; what is not seen is not in it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tracekit.spec import LayerSpec

Row = dict[int, float]
SLACK = 1e-6


def attention(
    layer: LayerSpec, query_HTD: np.ndarray, key_GTD: np.ndarray
) -> tuple[list[list[Row]], np.ndarray]:
    """Return the rows of each query head, scaled to 1 over the keys, and the keys' share [H, T]."""
    num_heads, num_rows = query_HTD.shape[:2]
    window = layer.window or num_rows
    share_HT = np.ones((num_heads, num_rows))
    rows: list[list[Row]] = [[] for _ in range(num_heads)]
    for h in range(num_heads):
        for t in range(num_rows):
            logits = {}
            for j in range(max(0, t + 1 - window), t + 1):
                logit = layer.scale * float(query_HTD[h, t] @ key_GTD[h // layer.group_size, j])
                if layer.softcap is not None:
                    logit = layer.softcap * math.tanh(logit / layer.softcap)
                logits[j] = logit
            peak = max(logits.values())
            total = sum(math.exp(logit - peak) for logit in logits.values())
            if layer.sinks is not None:
                share_HT[h, t] = total / (total + math.exp(layer.sinks[h] - peak))
            rows[h].append({j: math.exp(logit - peak) / total for j, logit in logits.items()})
    return rows, share_HT


def shape(row: Row, query: int) -> dict[str, float]:
    """Return what describes one row."""
    seen, total = len(row), sum(row.values())
    entropy = -sum(a * math.log(a) for a in row.values() if a > 0)
    found = {
        "seen_keys": seen,
        "entropy_nats": entropy,
        "entropy_frac": entropy / math.log(seen) if seen > 1 else math.nan,
        "effective_keys": total**2 / sum(a * a for a in row.values()),
        "gini": gini(row),
        "mean_distance": sum(a * (query - j) for j, a in row.items()),
    }
    for percent in (90, 95, 99):
        found[f"keys_{percent}"] = keys_for(row, percent)
        found[f"keys_{percent}_frac"] = keys_for(row, percent) / seen
    for percent in (1, 5, 10):
        largest = sorted(row.values(), reverse=True)[: math.ceil(seen * percent / 100)]
        found[f"top_{percent}_mass"] = sum(largest)
    for n in (1, 4):
        found[f"first_{n}_mass"] = sum(a for j, a in row.items() if j < n)
    for n in (1, 32, 128):
        found[f"newest_{n}_mass"] = sum(a for j, a in row.items() if query - j < n)
    return found


def by_distance(row: Row, query: int, num_tokens: int, window: int | None) -> list[float]:
    """Return the mass at distance 0, 1, 2 to 3 ... as far as any row sees, without key 0."""
    farthest = min(num_tokens, window or num_tokens) - 1
    bins: list[range] = [range(1)]
    while bins[-1].stop <= farthest:
        bins.append(range(bins[-1].stop, 2 * bins[-1].stop))
    return [sum(a for j, a in row.items() if j > 0 and query - j in one) for one in bins]


def gini(row: Row) -> float:
    """Return the mean difference of all pairs of keys over twice the mean weight."""
    weights = list(row.values())
    differences = sum(abs(one - other) for one in weights for other in weights)
    return differences / (2 * len(weights) * sum(weights))


def keys_for(row: Row, percent: int) -> int:
    """Return how many keys, largest first, hold a share of the mass."""
    mass, count = 0.0, 0
    for weight in sorted(row.values(), reverse=True):
        mass, count = mass + weight, count + 1
        if mass >= percent / 100 - SLACK:
            break
    return count


def mean_row(rows: Sequence[Row]) -> Row:
    """Return the mean of rows over the same keys."""
    return {j: sum(row[j] for row in rows) / len(rows) for j in rows[0]}


def best(score: dict[int, float]) -> list[int]:
    """Return keys from the best to the worst: float32 score, then the newer key."""
    return sorted(score, key=lambda j: (np.float32(score[j]), j), reverse=True)


def top(row: Row, k: int) -> set[int]:
    """Return the k largest keys of a row."""
    return set(best(row)[:k])


def jaccard(one: Collection[int], other: Collection[int]) -> float:
    """Return common keys over all keys."""
    return len(set(one) & set(other)) / len(set(one) | set(other))


def overlap(tops: Sequence[set[int]], lag: int) -> float:
    """Return which part of a row's top keys is still there ``lag`` rows later, mean over rows."""
    parts = [
        len(tops[t] & tops[t + lag]) / len(tops[t]) for t in range(len(tops)) if t + lag < len(tops)
    ]
    return sum(parts) / len(parts)


def half_life(lags: Sequence[int], curve: Sequence[float]) -> float | None:
    """Walk along the curve in small steps of its straight lines until it is at half."""
    points = [(0, 1.0), *zip(lags, curve, strict=True)]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= 0.5:
            steps = 100_000
            for step in range(steps + 1):
                if y0 + (y1 - y0) * step / steps <= 0.5:
                    return x0 + (x1 - x0) * step / steps
    return None


def needed(row: Row, order: Sequence[int], point: int, percent: int) -> int:
    """Return how many first keys of an order a row needs beside those from the point on."""
    for count in range(len(order)):
        kept = {*order[:count], *(j for j in row if j >= point)}
        if sum(a for j, a in row.items() if j in kept) >= percent / 100 - SLACK:
            return count
    return len(order)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least a share of the values does not exceed."""
    for value in sorted(values):
        if sum(one <= value for one in values) >= share * len(values) - 1e-12:
            return value
    raise AssertionError


def variance(values: Sequence[float]) -> float:
    """Return the mean squared distance from the mean."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


TOP, SINKS, RECENT = 8, 4, 16


class SlowLayer:
    """The result rows of one layer, number by number."""

    def __init__(
        self, layer: LayerSpec, query_HTD: np.ndarray, key_GTD: np.ndarray, first_row: int
    ) -> None:
        rows, share_HT = attention(layer, query_HTD, key_GTD)
        self.layer = layer
        self.times = range(first_row, key_GTD.shape[1])
        self.rows = [[head[t] for t in self.times] for head in rows]
        self.share = share_HT[:, first_row:]
        size = layer.group_size
        self.heads: dict[int, list[int]] = {
            g: list(range(g * size, (g + 1) * size)) for g in range(layer.num_kv_heads)
        }
        self.heads[-1] = list(range(layer.num_heads))

    def shapes(self, kv_head: int) -> dict[str, float]:
        """Return means over rows and heads, and the variance of the entropy."""
        every = [
            shape(row, t) | {"key_mass": self.share[h][at]}
            for h in self.heads[kv_head]
            for at, (t, row) in enumerate(zip(self.times, self.rows[h], strict=True))
        ]
        means = {}
        for name in every[0]:
            values = [one[name] for one in every if not math.isnan(one[name])]
            means[name] = sum(values) / len(values) if values else math.nan
        entropies = [
            [shape(row, t)["entropy_nats"] for t, row in zip(self.times, self.rows[h], strict=True)]
            for h in self.heads[kv_head]
        ]
        means["entropy_variance"] = float(np.mean([variance(one) for one in entropies]))
        return means

    def distance_mass(self, kv_head: int) -> list[float]:
        """Return the mass by distance, mean over rows and heads."""
        of = (self.times.stop, self.layer.window)
        every = [
            by_distance(row, t, *of)
            for h in self.heads[kv_head]
            for t, row in zip(self.times, self.rows[h], strict=True)
        ]
        return [float(np.mean(one)) for one in zip(*every, strict=True)]

    def tops(self, heads: Sequence[int]) -> list[set[int]]:
        """Return the top keys of the mean of some heads, of rows that see more keys than that."""
        means = [mean_row(rows) for rows in zip(*(self.rows[h] for h in heads), strict=True)]
        return [top(row, TOP) for row in means if len(row) > TOP]

    def curve(self, kv_head: int) -> tuple[list[int], list[float]]:
        """Return the overlap by lag, mean over heads."""
        tops = [self.tops([h]) for h in self.heads[kv_head]]
        lags = [lag for lag in (1, 2, 4, 8, 16, 32, 64) if lag < len(tops[0])]
        return lags, [float(np.mean([overlap(one, lag) for one in tops])) for lag in lags]

    def group_jaccard(self, kv_head: int) -> float:
        """Return the mean over rows and pairs of heads of the same group."""
        groups = [g for g in self.heads if g >= 0 and kv_head in (g, -1)]
        values = []
        for group in groups:
            tops = [self.tops([h]) for h in self.heads[group]]
            values += _pairs(tops)
        return float(np.mean(values)) if values else math.nan

    def kv_head_jaccard(self, kv_head: int) -> float:
        """Return the mean over rows and the other KV heads, all pairs for the layer."""
        tops = {g: self.tops(self.heads[g]) for g in self.heads if g >= 0}
        if kv_head == -1:
            values = _pairs(list(tops.values()))
        else:
            others = [tops[g] for g in tops if g != kv_head]
            values = [jaccard(*both) for o in others for both in zip(tops[kv_head], o, strict=True)]
        return float(np.mean(values)) if values else math.nan

    def later(self, head: int, row: int) -> list[Row]:
        """Return the rows of a query head from a position on."""
        return [one for t, one in zip(self.times, self.rows[head], strict=True) if t >= row]

    def row_variance(self, kv_head: int, point: int, row: int) -> float:
        """Return the variance over later rows of what each old key gets, summed over keys."""
        sums = []
        for h in self.heads[kv_head]:
            rows = self.later(h, row)
            sums.append(sum(variance([one.get(j, 0.0) for one in rows]) for j in self.old(point)))
        return float(np.mean(sums))

    def old(self, point: int) -> range:
        """Return the keys that the cache holds at the point."""
        return range(point - self.layer.entries(point), point)

    def needed_frac(
        self, kv_head: int, point: int, row: int, percent: int, share: float, *, protect: bool
    ) -> float:
        """Return the part of the old keys that a share of later rows and heads needs."""
        counts: list[float] = []
        groups = [g for g in self.heads if g >= 0 and kv_head in (g, -1)]
        for group in groups:
            rows = [one for h in self.heads[group] for one in self.later(h, row)]
            order = best({j: sum(one.get(j, 0.0) for one in rows) for j in self.old(point)})
            kept = [j for j in order if protect and (j < SINKS or j >= point - RECENT)]
            order = kept + [j for j in order if j not in kept]
            counts += [max(len(kept), needed(one, order, point, percent)) for one in rows]
        return quantile(counts, share) / len(self.old(point))


def _pairs(tops: Sequence[Sequence[set[int]]]) -> list[float]:
    """Return the Jaccard overlaps of all pairs of heads at all rows."""
    return [
        jaccard(*both)
        for n, one in enumerate(tops)
        for other in tops[:n]
        for both in zip(one, other, strict=True)
    ]
