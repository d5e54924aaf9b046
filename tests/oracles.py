"""Slow, obvious twins of the KV engine, written by loops from the formulas.

One layer, one kept amount, one row at a time, float64, plain sets of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tracekit.spec import LayerSpec


SlowScore = Callable[["SlowLayer", int], dict[int, float]]
"""From a cache and a KV head to the score of each key that it holds."""


Wanted = tuple[int, float, int]
"""Tier, number in the tier, position of a key."""


@dataclass
class SlowLayer:
    """The cache of one layer: what each KV head holds, and what its keys have received."""

    layer: LayerSpec
    query_HTD: np.ndarray
    key_GTD: np.ndarray
    value_GTD: np.ndarray
    seen: int = 0
    held: list[set[int]] = field(default_factory=list)
    log: list[list[dict[int, float]]] = field(default_factory=list)
    evicted_at: list[dict[int, int]] = field(default_factory=list)
    clipped: bool = False
    influence_PHTD: np.ndarray | None = None

    def __post_init__(self) -> None:
        for _ in range(self.layer.num_kv_heads):
            self.held.append(set())
            self.evicted_at.append({})

    def heads_of(self, group: int) -> range:
        size = self.layer.group_size
        return range(group * size, (group + 1) * size)

    def step(self) -> list[np.ndarray]:
        """Read one row; return the attention output of each query head; ``log`` has its weights."""
        position, outputs = self.seen, []
        self.seen += 1
        self.log.append([])
        for g in range(self.layer.num_kv_heads):
            self.held[g].add(position)
            self._leave_window(g)
            rows = [self.attention(h, position, self.held[g]) for h in self.heads_of(g)]
            self.log[-1] += rows
            outputs += [self.output(row, g) for row in rows]
        return outputs

    def output(self, weights: dict[int, float], group: int) -> np.ndarray:
        """Return the weighted sum of values."""
        zero = np.zeros(self.value_GTD.shape[-1])
        return sum((a * self.value_GTD[group, j] for j, a in weights.items()), zero)

    def attention(self, head: int, position: int, keys: Collection[int]) -> dict[int, float]:
        """Return the softmax of one row over the keys among ``keys`` that it may see."""
        window = self.layer.window or math.inf
        group = head // self.layer.group_size
        logits = {}
        for j in keys:
            if position - window < j <= position:
                dot = float(self.query_HTD[head, position] @ self.key_GTD[group, j])
                logit = self.layer.scale * dot
                if self.layer.softcap is not None:
                    logit = self.layer.softcap * math.tanh(logit / self.layer.softcap)
                if self.layer.alibi is not None:
                    logit -= self.layer.alibi[head] * (position - j)
                logits[j] = logit
        all_logits = list(logits.values())
        if self.layer.sinks is not None:
            all_logits.append(self.layer.sinks[head])
        peak = max(all_logits, default=0.0)
        total = sum(math.exp(logit - peak) for logit in all_logits)
        return {j: math.exp(logit - peak) / total for j, logit in logits.items()}

    def decide(
        self,
        score: SlowScore,
        budgets: Sequence[int],
        sinks: int,
        recent: Sequence[int],
        share: Callable[[list[list[Wanted]], Sequence[int]], Sequence[int]] | None = None,
        template: Collection[int] = (),
    ) -> None:
        """Evict down to the budgets, one a head; what a head cannot use goes to the next best.

        ``share`` turns what is wanted, head by head, and the budgets into others of the same sum.
        """
        wanted = [
            self._wanted(g, score(self, g), sinks, recent[g], template)
            for g in range(self.layer.num_kv_heads)
        ]
        budgets = list(budgets) if share is None else list(share(wanted, budgets))
        protected = [sum(one[0] > 0 for one in row) for row in wanted]
        self.clipped |= any(p > b for p, b in zip(protected, budgets, strict=True))
        spare = sum(max(0, b - len(row)) for b, row in zip(budgets, wanted, strict=True))
        rest = [(one, -g) for g, row in enumerate(wanted) for one in row[budgets[g] :]]
        for one, minus_g in sorted(rest, reverse=True)[spare:]:
            self.held[-minus_g].remove(one[2])
            self.evicted_at[-minus_g][one[2]] = self.seen

    def _wanted(
        self,
        group: int,
        scores: dict[int, float],
        sinks: int,
        recent: int,
        template: Collection[int],
    ) -> list[Wanted]:
        """Return (tier, number in the tier, position) of each key held, most wanted first."""
        wanted = []
        for j in self.held[group]:
            if j < sinks:
                wanted.append((3, -float(j), j))
            elif j >= self.seen - recent:
                wanted.append((2, 0.0, j))
            elif j in template:
                wanted.append((1, 0.0, j))
            else:
                wanted.append((0, float(np.float32(scores[j])), j))
        return sorted(wanted, reverse=True)

    def _leave_window(self, group: int) -> None:
        if self.layer.window is not None:
            self.held[group] = {j for j in self.held[group] if j >= self.seen - self.layer.window}


def entries(amount: float, unit: str, whole: int) -> int:
    """Return tokens as they are, a fraction as the floor of that decimal number of the whole."""
    return int(amount) if unit == "tok" else int(Decimal(repr(amount)) * whole)


def reduce(values: list[float], how: str) -> float:
    """Return mean, max or sum."""
    return {"mean": lambda v: sum(v) / len(v), "max": max, "sum": sum}[how](values)


def row_kl(pruned: dict[int, float], full: dict[int, float]) -> float:
    """Return KL(pruned || full) of a row's attention, what sink logits take included."""
    total = sum(a * math.log(a / full[j]) for j, a in pruned.items() if a > 0 and full[j] > 0)
    rest, full_rest = 1 - sum(pruned.values()), 1 - sum(full.values())
    return total + (rest * math.log(rest / full_rest) if min(rest, full_rest) > 1e-12 else 0.0)


def influence(cache: SlowLayer, delta_HRD: np.ndarray, first: int) -> np.ndarray:
    """Return gradient times change of output, [G, P, R], of the rows from a position on."""
    num_probes, num_groups = len(cache.influence_PHTD), cache.layer.num_kv_heads
    found_GPR = np.zeros((num_groups, num_probes, delta_HRD.shape[1]))
    for g in range(num_groups):
        for p in range(num_probes):
            for r in range(delta_HRD.shape[1]):
                for h in cache.heads_of(g):
                    gradient_D = cache.influence_PHTD[p, h, first + r]
                    found_GPR[g, p, r] += sum(gradient_D * delta_HRD[h, r])
    return found_GPR


def zero_scores(cache: SlowLayer, group: int) -> dict[int, float]:
    """Score of ``full``."""
    return dict.fromkeys(cache.held[group], 0.0)


def recency_scores(cache: SlowLayer, group: int) -> dict[int, float]:
    """Score of ``streaming`` and ``window``: the position."""
    return {j: float(j) for j in cache.held[group]}


def key_norm_scores(cache: SlowLayer, group: int) -> dict[int, float]:
    """Score of ``knorm``: minus the norm."""
    return {j: -math.sqrt(sum(x * x for x in cache.key_GTD[group, j])) for j in cache.held[group]}


def received_scores(how: str) -> Callable[[SlowLayer, int], dict[int, float]]:
    """Score of ``h2o``: attention received so far, each row reduced over the group's heads."""

    def score(cache: SlowLayer, group: int) -> dict[int, float]:
        heads = cache.heads_of(group)
        return {
            j: sum(reduce([row[h].get(j, 0.0) for h in heads], how) for row in cache.log)
            for j in cache.held[group]
        }

    return score


def random_scores(seed: int) -> Callable[[SlowLayer, int], dict[int, float]]:
    """Score of ``random``: splitmix64 of seed, layer, KV head and position, its first 24 bits."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    def score(cache: SlowLayer, group: int) -> dict[int, float]:
        state = mix(mix(mix(seed % 2**64) ^ cache.layer.index) ^ group)
        return {j: (mix(state ^ j) >> 40) / 2**24 for j in cache.held[group]}

    return score


def window_scores(
    window: int, kernel: int, pool: str, group_reduce: str, order: str
) -> Callable[[SlowLayer, int], dict[int, float]]:
    """Score of ``snapkv``: mean attention of the last rows, pooled over neighbours in the cache."""

    def score(cache: SlowLayer, group: int) -> dict[int, float]:
        rows = range(max(0, cache.seen - window), cache.seen)
        keys = sorted(cache.held[group])
        line_keys = [j for j in keys if j < cache.seen - window]
        lines = []
        for head in cache.heads_of(group):
            attention = [cache.attention(head, q, keys) for q in rows]
            lines.append([sum(row.get(j, 0.0) for row in attention) / len(rows) for j in line_keys])
        if order == "pool_group":
            lines = [pooled(line, kernel, pool) for line in lines]
        line = [reduce(list(values), group_reduce) for values in zip(*lines, strict=True)]
        if order == "group_pool":
            line = pooled(line, kernel, pool)
        return dict.fromkeys(keys, math.inf) | dict(zip(line_keys, line, strict=True))

    return score


def pooled(line: list[float], kernel: int, how: str) -> list[float]:
    """Return the mean (zeros beyond the ends) or maximum of each number's neighbourhood."""
    half, padded = kernel // 2, [0.0] * (kernel // 2) + line + [0.0] * (kernel // 2)
    parts = [padded[i : i + 2 * half + 1] for i in range(len(line))]
    return [sum(part) / kernel if how == "avg" else max(part) for part in parts]
