"""Slow, obvious twins of selectors and of the two tiers, by loops over rows, heads and entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests import oracles

if TYPE_CHECKING:
    from collections.abc import Mapping

SlowChoice = Callable[["SlowReader", int, int], set[int]]
"""From a cache, a KV head and a budget to the entries that the newest row reads."""


@dataclass
class SlowReader(oracles.SlowLayer):
    """A layer whose rows read a part of what is held once ``choose`` is set."""

    choose: SlowChoice | None = None
    first_decision: int = 0
    budgets: list[int] = field(default_factory=list)
    """By position: entries that its row may read."""
    read: list[list[set[int]]] = field(default_factory=list)
    """By row and KV head: what was read."""

    def step(self) -> list[np.ndarray]:
        position, outputs = self.seen, []
        self.seen += 1
        self.log.append([])
        self.read.append([])
        for g in range(self.layer.num_kv_heads):
            self.held[g].add(position)
            self._leave_window(g)
            chosen = set(self.held[g])
            if self.choose is not None:
                chosen &= self.choose(self, g, self.budgets[position])
            self.read[-1].append(chosen)
            rows = [self.attention(h, position, chosen) for h in self.heads_of(g)]
            self.log[-1] += rows
            outputs += [self.output(row, g) for row in rows]
        return outputs

    @property
    def now(self) -> int:
        """Position of the newest row."""
        return self.seen - 1

    def line(self, group: int) -> list[int]:
        """Return the entries that were never evicted, in order, out of the window or not."""
        return [j for j in range(self.seen) if j not in self.evicted_at[group]]

    def pages(self, group: int, size: int) -> list[list[int]]:
        line = self.line(group)
        return [line[start : start + size] for start in range(0, len(line), size)]

    def softmax(self, head: int, logits: Mapping[int, float]) -> dict[int, float]:
        """Return the softmax of a head's logits, its sink logit in the denominator."""
        sinks = [] if self.layer.sinks is None else [self.layer.sinks[head]]
        peak = max([*logits.values(), *sinks], default=0.0)
        total = sum(math.exp(one - peak) for one in [*logits.values(), *sinks])
        return {j: math.exp(one - peak) / total for j, one in logits.items()}

    def logits(
        self, head: int, query: np.ndarray, keys: Mapping[int, np.ndarray]
    ) -> dict[int, float]:
        logits = {}
        for j, key in keys.items():
            logit = self.layer.scale * float(query @ key)
            if self.layer.softcap is not None:
                logit = self.layer.softcap * math.tanh(logit / self.layer.softcap)
            if self.layer.alibi is not None:
                logit -= self.layer.alibi[head] * (self.now - j)
            logits[j] = logit
        return logits


def best(scores: Mapping[int, float], count: int) -> list[int]:
    """Return the names of the highest scores in float32, the later one among equals."""
    return sorted(scores, key=lambda j: (float(np.float32(scores[j])), j), reverse=True)[:count]


def by_group(lines: list[dict[int, float]], how: str) -> dict[int, float]:
    """Return what the query heads of a KV head say, reduced."""
    return {j: oracles.reduce([line[j] for line in lines], how) for j in lines[0]}


def with_own(cache: SlowReader, weights: Mapping[int, float], budget: int) -> set[int]:
    """Return the row's own entry and the best others."""
    others = {j: a for j, a in weights.items() if j != cache.now}
    return {cache.now, *best(others, budget - 1)}


def whole_pages(
    cache: SlowReader, group: int, size: int, budget: int
) -> tuple[list[list[int]], dict[int, list[int]], int]:
    """Return all pages, the full ones before the row's own with an entry in sight, and how many."""
    pages = cache.pages(group, size)
    candidates = {
        p: page for p, page in enumerate(pages[:-1]) if any(j in cache.held[group] for j in page)
    }
    return pages, candidates, max(0, budget - len(pages[-1])) // size


def quest(size: int, least: int, how: str) -> SlowChoice:
    """Read the pages of the highest bound, and the row's own."""

    def choose(cache: SlowReader, group: int, budget: int) -> set[int]:
        pages, candidates, count = whole_pages(cache, group, size, budget)
        lines = []
        for head in cache.heads_of(group):
            query = cache.query_HTD[head, cache.now]
            line = {}
            for p, page in candidates.items():
                keys = cache.key_GTD[group, page]
                line[p] = sum(
                    max(q * min(keys[:, d]), q * max(keys[:, d])) for d, q in enumerate(query)
                )
            lines.append(line)
        chosen = best(by_group(lines, how), max(count, least - 1))
        return {j for p in [*chosen, len(pages) - 1] for j in pages[p]}

    return choose


def shadowkv(size: int, local: int, outliers: float, how: str) -> SlowChoice:
    """Read the newest chunks, then those unlike their mean, then those whose mean is attended to."""

    def choose(cache: SlowReader, group: int, budget: int) -> set[int]:
        pages, candidates, count = whole_pages(cache, group, size, budget)
        means, unlike = {}, {}
        for p, page in candidates.items():
            keys = cache.key_GTD[group, page]
            means[p] = sum(keys) / size
            unlike[p] = -min(cosine(key, means[p]) for key in keys)
        newest = [p for p in candidates if p >= len(pages) - 1 - local]
        old = {p: one for p, one in unlike.items() if p not in newest}
        outlying = best(old, int(count * outliers))
        lines = []
        for head in cache.heads_of(group):
            query = cache.query_HTD[head, cache.now]
            logits = {p: cache.layer.scale * float(query @ mean) for p, mean in means.items()}
            peak = max(logits.values(), default=0.0)
            total = sum(math.exp(one - peak) for one in logits.values())
            lines.append({p: math.exp(one - peak) / total for p, one in logits.items()})
        rank = by_group(lines, how)
        rank |= dict.fromkeys(outlying, 2.0) | dict.fromkeys(newest, 3.0)
        return {j for p in [*best(rank, count), len(pages) - 1] for j in pages[p]}

    return choose


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    norms = math.sqrt(sum(one * one)) * math.sqrt(sum(other * other))
    return float(one @ other) / norms if norms > 0 else 0.0


def doublesparse(num_channels: int, heavy: str, how: str) -> SlowChoice:
    """Read the best by some channels, found on the rows before the first decision."""

    def choose(cache: SlowReader, group: int, budget: int) -> set[int]:
        rows = range(cache.first_decision)
        sums = {}
        for d in range(cache.key_GTD.shape[-1]):
            weight = sum(abs(cache.key_GTD[group, j, d]) for j in rows) / len(rows)
            if heavy == "product":
                queries = [
                    abs(cache.query_HTD[h, j, d]) for h in cache.heads_of(group) for j in rows
                ]
                weight *= sum(queries) / len(queries)
            sums[-d] = weight  # among equals the first channel
        channels = [-d for d in best(sums, num_channels)]
        keys = {j: cache.key_GTD[group, j, channels] for j in cache.held[group]}
        lines = [
            cache.softmax(h, cache.logits(h, cache.query_HTD[h, cache.now, channels], keys))
            for h in cache.heads_of(group)
        ]
        return with_own(cache, by_group(lines, how), budget)

    return choose


def previous(how: str) -> SlowChoice:
    """Read the best by the query before."""

    def choose(cache: SlowReader, group: int, budget: int) -> set[int]:
        keys = {j: cache.key_GTD[group, j] for j in cache.held[group]}
        lines = [
            cache.softmax(h, cache.logits(h, cache.query_HTD[h, cache.now - 1], keys))
            for h in cache.heads_of(group)
        ]
        return with_own(cache, by_group(lines, how), budget)

    return choose


def own_attention(cache: SlowReader, group: int, how: str) -> dict[int, float]:
    held = cache.held[group]
    return by_group([cache.attention(h, cache.now, held) for h in cache.heads_of(group)], how)


def topk(how: str) -> SlowChoice:
    """Read the best by the row's own attention."""
    return lambda cache, group, budget: set(best(own_attention(cache, group, how), budget))


def topp(mass: float, how: str) -> SlowChoice:
    """Read the fewest with a share of the row's own attention, to a billionth."""

    def choose(cache: SlowReader, group: int, budget: int) -> set[int]:
        del budget
        weights = own_attention(cache, group, how)
        line, reached = sorted(weights.values(), reverse=True), 0.0
        for count, weight in enumerate(line, start=1):
            reached += weight
            if reached >= mass * (1 - 1e-9) * sum(line):
                return set(best(weights, count))
        return set(weights)

    return choose


def slow_fetches(
    reader: SlowReader,
    capacity: Callable[[int], int],
    replace: str,
    visible: list[list[set[int]]],
    group: int,
) -> list[int]:
    """Return what each row after the first decision fetches, one row and one entry at a time.

    ``visible`` has, by position and KV head, what each row could read.
    """
    first = reader.first_decision
    before = sorted(j for j in visible[first][group] if j < first)
    fast = before[max(0, len(before) - capacity(first)) :]
    last_touch = {j: j for j in range(first)}
    times_read = dict.fromkeys(range(first), 0)
    fetches = []
    for t in range(first, reader.seen):
        fast = [j for j in fast if j in visible[t][group]] + [t]
        last_touch[t], times_read[t] = t, 0
        fetches.append(0)
        for j in reader.read[t][group]:
            last_touch[j] = t
            times_read[j] += 1
            if j not in fast:
                fast.append(j)
                fetches[-1] += 1
        worth = last_touch if replace == "lru" else times_read
        while len(fast) > capacity(t + 1):
            fast.remove(min(fast, key=lambda j: (worth[j], j)))
    return fetches
