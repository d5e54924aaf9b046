"""Slow, obvious twins of stored and turned entries: plain loops over one layer's cache, float64."""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.oracles import SlowLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tracekit.spec import RopeSpec

    Rows = list[np.ndarray]
    Store = Callable[[Rows, Rows, list[int]], tuple[Rows, Rows]]
    """From keys, values and positions of some entries of a head to both as read back."""


def turned(x_D: np.ndarray, position: float, rope: RopeSpec) -> np.ndarray:
    """Return a row turned by a position: pair by pair, as complex numbers."""
    size, turned_D = len(rope.inv_freq), x_D.copy()
    for f, frequency in enumerate(rope.inv_freq):
        i, j = (f, size + f) if rope.layout == "halves" else (2 * f, 2 * f + 1)
        pair = complex(x_D[i], x_D[j]) * cmath.exp(1j * frequency * position)
        turned_D[i], turned_D[j] = pair.real, pair.imag
    return turned_D


@dataclass
class SlowStore(SlowLayer):
    """A cache that evicts, then stores the oldest open entries in groups, each group once."""

    stores: Sequence[Store] = ()
    """One a KV head; empty if entries stay as they are written."""
    residual: int = 0
    together: int = 1
    closed: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        arrays = self.query_HTD, self.key_GTD, self.value_GTD
        self.query_HTD, self.key_GTD, self.value_GTD = (array.copy() for array in arrays)
        self.closed = [set() for _ in self.held]

    def run(
        self, point: int, due: Collection[int], decide: Callable[[int], None]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs [H, R, D] of the rows from a point on, and closed entries [G, R].

        Decisions come first, then the row, which sees what was closed before it, then its closing.
        """
        outputs, counts = [], []
        for t in range(self.key_GTD.shape[1]):
            if t in due:
                decide(t)
                self.close()
            output = self.step()
            if t >= point:
                outputs.append(output)
                pairs = zip(self.closed, self.held, strict=True)
                counts.append([len(closed & held) for closed, held in pairs])
                self.close()
        return np.array(outputs).swapaxes(0, 1), np.array(counts).T

    def close(self) -> None:
        """Store entries until no more than the residual window and a part of a group are open."""
        for g, store in enumerate(self.stores):
            while len(still_open := sorted(self.held[g] - self.closed[g])) >= (
                self.residual + self.together
            ):
                group = still_open[: self.together]
                keys = [self.key_GTD[g, j] for j in group]
                values = [self.value_GTD[g, j] for j in group]
                for j, key, value in zip(group, *store(keys, values, group), strict=True):
                    self.key_GTD[g, j], self.value_GTD[g, j] = key, value
                self.closed[g] |= set(group)


@dataclass
class SlowTurned(SlowStore):
    """A cache of keys before the rotary embedding, turned at each row by their place in the cache.

    The row's own place is the number of entries before it, as StreamingLLM defines it.
    """

    rope: RopeSpec | None = None

    def attention(self, head: int, position: int, keys: Collection[int]) -> dict[int, float]:
        """Return the softmax over some of the keys, all turned by their place among ``keys``."""
        if self.rope is None:
            return super().attention(head, position, keys)
        group, rope = head // self.layer.group_size, self.rope
        line = sorted({j for j in keys if j <= position} | {position})
        recorded = self.query_HTD[head, position].copy(), self.key_GTD[group, line].copy()
        place = dict(zip(line, range(len(line)), strict=True))
        query = turned(turned(recorded[0], -position, rope), place[position], rope)
        self.query_HTD[head, position] = query
        self.key_GTD[group, line] = [
            turned(turned(key, -j, rope), place[j], rope)
            for j, key in zip(line, recorded[1], strict=True)
        ]
        weights = super().attention(head, position, keys)
        self.query_HTD[head, position], self.key_GTD[group, line] = recorded
        return weights


def integers(bits: int, key: str, value: str, group: int) -> Store:
    """Store as codes: zero + scale * code, scale and zero point in float16."""

    def line(numbers: list[float]) -> list[float]:
        low, high = (min(max(end(numbers), -65504.0), 65504.0) for end in (min, max))
        zero = float(np.float16(np.float32(low)))
        scale = float(np.float16(np.float32((high - low) / (2**bits - 1))))
        codes = [round(min(max((x - zero) / (scale or 1.0), 0), 2**bits - 1)) for x in numbers]
        return [zero + scale * code for code in codes]

    def coded(rows: list[np.ndarray], along: str) -> list[np.ndarray]:
        new = [row.copy() for row in rows]
        size = len(rows[0])
        if along == "channel":
            for start in range(0, len(rows), group):
                part = range(start, start + group)
                for d in range(size):
                    for i, x in zip(part, line([float(rows[i][d]) for i in part]), strict=True):
                        new[i][d] = x
        else:
            for i, row in enumerate(rows):
                for start in range(0, size, group):
                    new[i][start : start + group] = line(row[start : start + group].tolist())
        return new

    return lambda keys, values, positions: (coded(keys, key), coded(values, value))


def float8(x: float) -> float:
    """Return the nearest e4m3 number, ties to even."""
    x = min(max(float(np.float32(x)), -448.0), 448.0)
    exponent = max(math.floor(math.log2(abs(x))), -6) if x else -6
    step = 2.0 ** (exponent - 3)
    return round(x / step) * step


def floats() -> Store:
    """Store as e4m3 numbers."""

    def coded(rows: list[np.ndarray]) -> list[np.ndarray]:
        return [np.array([float8(x) for x in row]) for row in rows]

    return lambda keys, values, positions: (coded(keys), coded(values))


def low_rank(key_GTD: np.ndarray, value_GTD: np.ndarray, rank: int, rope: RopeSpec | None) -> Store:
    """Store as projections on the leading singular vectors of all rows, keys before the rope."""

    def back(x_D: np.ndarray, position: float) -> np.ndarray:
        return x_D if rope is None else turned(x_D, position, rope)

    unturned = np.array([back(key, -t) for key_TD in key_GTD for t, key in enumerate(key_TD)])
    bases = [np.linalg.svd(rows)[2][:rank] for rows in (unturned, np.concatenate(value_GTD))]

    def project(x_D: np.ndarray, basis_RD: np.ndarray) -> np.ndarray:
        return sum((float(x_D @ one) * one for one in basis_RD), np.zeros_like(x_D))

    return lambda keys, values, positions: (
        [back(project(back(k, -t), bases[0]), t) for k, t in zip(keys, positions, strict=True)],
        [project(value, bases[1]) for value in values],
    )
