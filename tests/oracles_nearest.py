"""Slow twins of estimators from context, embeddings, attention and layers: loops over formulas.

They import nothing of the package.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Rows = Sequence[Sequence[float]]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """0 with a row of zeros; as float32, so that what is alike up to rounding is equal."""
    lengths = math.sqrt(dot(a, a)) * math.sqrt(dot(b, b))
    return float(np.float32(dot(a, b) / lengths)) if lengths else 0.0


def nearest(rows: Rows, own: int, n: int) -> list[int]:
    """Return the n other rows of highest cosine with one of them, ties by lower number."""
    others = [i for i in range(len(rows)) if i != own]
    return sorted(others, key=lambda i: (-cosine(rows[own], rows[i]), i))[:n]


def recent(tokens: Sequence[int]) -> list[int]:
    """Each token once, by its last use, latest first."""
    found: list[int] = []
    for token in reversed(tokens):
        if token not in found:
            found.append(token)
    return found


def neighbours(tokens: Sequence[int], rows: Rows, n: int) -> list[int]:
    """Return the context, the first neighbour of each of its tokens, the second of each, ..."""
    found = recent(tokens)
    near = [nearest(rows, token, n) for token in found]
    for level in range(n):
        for ids in near:
            if level < len(ids) and ids[level] not in found:
                found.append(ids[level])
    return found


def anchors(
    attention: Sequence[float],
    states: Rows,
    rows: Rows,
    *,
    top: int,
    power: float,
    is_cosine: bool,
) -> list[float] | None:
    """Score of each row with the mean of the most attended states; None if there are none.

    ``attention`` ends with the step's own position; the first one is left out.
    """
    there = [i for i, weight in enumerate(attention) if i > 0 and weight > 0]
    there = sorted(there, key=lambda i: (-attention[i], i))[:top]
    if not there:
        return None
    total = math.fsum(attention[i] for i in there)
    weights = [(attention[i] / total) ** power for i in there]
    pooled = [
        math.fsum(w * states[i][e] for w, i in zip(weights, there, strict=True))
        / math.fsum(weights)
        for e in range(len(rows[0]))
    ]
    if is_cosine:
        return [dot(row, pooled) / (math.sqrt(dot(row, row)) or 1) for row in rows]
    return [dot(row, pooled) for row in rows]


def lens(state: Sequence[float], rows: Rows, bias: Sequence[float] | None) -> list[float]:
    """Logits of a layer's state."""
    shift = [0.0] * len(rows) if bias is None else bias
    return [dot(row, state) + b for row, b in zip(rows, shift, strict=True)]


def is_order_of(ids: Sequence[int], scores: Sequence[float], tolerance: float) -> bool:
    """Whether distinct ids are the best by score, best first, up to a near tie."""
    best = sorted(scores, reverse=True)[: len(ids)]
    found = [scores[i] for i in ids]
    scale = max(1.0, *(abs(score) for score in scores if math.isfinite(score)))
    return len(set(ids)) == len(ids) and all(
        a == b or abs(a - b) <= tolerance * scale for a, b in zip(found, best, strict=True)
    )
