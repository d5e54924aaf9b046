"""Slow, obvious twins of the budgets, written by loops from the formulas.

Layers are ``SlowLayer`` that have seen the prompt and still hold all of it. A plan gives the shares
of all heads, layer by layer; ``share_out`` turns them into entries.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.oracles import SlowLayer, Wanted
    from tracekit.spec import LayerSpec

Shares = list[list[float]]


def entry_bytes(layer: LayerSpec) -> int:
    return 2 * (layer.head_dim + layer.value_dim)


def most(layer: LayerSpec, num_tokens: int) -> int:
    return num_tokens if layer.window is None else min(num_tokens, layer.window)


def total_bytes(budget: int, layers: Sequence[LayerSpec], num_tokens: int) -> int:
    """Return the bytes of ``budget`` entries a head."""
    return sum(
        one.num_kv_heads * entry_bytes(one) * min(budget, most(one, num_tokens)) for one in layers
    )


def fill(
    shares: list[float], lows: list[float], highs: list[float], sizes: list[int], total: float
) -> list[float]:
    """Return min(high, max(low, level * share)) of ``total`` bytes; the level by halving."""

    def at(level: float) -> list[float]:
        bounded = zip(shares, lows, highs, strict=True)
        return [min(high, max(low, level * share)) for share, low, high in bounded]

    below, above = 0.0, max(h / s for h, s in zip(highs, shares, strict=True)) + 1
    for _ in range(200):
        level = (below + above) / 2
        used = sum(size * one for size, one in zip(sizes, at(level), strict=True))
        below, above = (level, above) if used <= total else (below, level)
    return at(below)


def share_out(
    shares: Shares, budget: int, layers: Sequence[LayerSpec], num_tokens: int
) -> list[list[int]]:
    """Return whole entries in proportion to shares, of the bytes of ``budget`` a head."""
    flat = [one for row in shares for one in row]
    sizes = [entry_bytes(one) for one, row in zip(layers, shares, strict=True) for _ in row]
    highs = [most(one, num_tokens) for one, row in zip(layers, shares, strict=True) for _ in row]
    total = total_bytes(budget, layers, num_tokens)
    wanted = [1.0] * len(flat)
    some = [x for x, one in enumerate(flat) if one > max(flat) / 2**40]
    none = [x for x in range(len(flat)) if x not in some]
    for part, share in ((some, flat), (none, [1.0] * len(flat))):
        left = total - sum(sizes[x] * wanted[x] for x in range(len(flat)) if x not in part)
        if part:
            one_each = [1.0] * len(part)
            columns = ([array[x] for x in part] for array in (share, highs, sizes))
            part_share, part_highs, part_sizes = columns
            filled = fill(part_share, one_each, part_highs, part_sizes, left + 1e-9)
            for x, value in zip(part, filled, strict=True):
                wanted[x] = value
    wanted = [round(one * 2**20) / 2**20 for one in wanted]
    counts = [math.floor(one) for one in wanted]
    left = total - sum(size * one for size, one in zip(sizes, counts, strict=True))
    order = sorted(range(len(flat)), key=lambda x: counts[x] - wanted[x])
    given = True
    while given:
        given = False
        for x in order:
            if counts[x] < highs[x] and sizes[x] <= left:
                counts[x], left, given = counts[x] + 1, left - sizes[x], True
    rows = iter(counts)
    return [[next(rows) for _ in row] for row in shares]


def even(layers: Sequence[SlowLayer], values: Sequence[float]) -> Shares:
    return [[value] * one.layer.num_kv_heads for one, value in zip(layers, values, strict=True)]


def pyramid(budget: Any, layers: Sequence[SlowLayer], entries: int) -> Shares:
    """Lines of kvpress' PyramidKVPress."""
    n, w, num_layers = layers[0].seen, budget.pyramid_window, len(layers)
    low = entries / budget.beta
    high = 2 * entries - low
    if high >= n - w:
        high, low = n - w, 2 * entries - (n - w)
    if not n >= high >= low >= w:
        return even(layers, [entries] * num_layers)
    step = (high - low) / (num_layers - 1) if num_layers > 1 else 0
    return even(layers, [round(high - place * step) for place in range(num_layers)])


def tiers(budget: Any, layers: Sequence[SlowLayer], entries: int) -> Shares:
    floors, highs, sizes = [], [], []
    for place, one in enumerate(layers):
        depth = place / (len(layers) - 1) if len(layers) > 1 else 0
        part = budget.deep if depth >= budget.deep_from else budget.shallow
        high = most(one.layer, one.seen)
        for _ in range(one.layer.num_kv_heads):
            floor = math.ceil(Decimal(repr(part)) * one.seen)
            floors.append(float(max(1, min(high, floor))))
            highs.append(high)
            sizes.append(entry_bytes(one.layer))
    total = total_bytes(entries, [one.layer for one in layers], layers[0].seen)
    if sum(size * floor for size, floor in zip(sizes, floors, strict=True)) > total:
        flat = floors
    else:
        flat = fill([1.0] * len(floors), floors, highs, sizes, total)
    rows = iter(flat)
    return [[next(rows) for _ in range(one.layer.num_kv_heads)] for one in layers]


def last_rows(layer: SlowLayer, num_rows: int) -> list[dict[int, float]]:
    """Return the attention of the last rows, head by head."""
    heads, rows = range(layer.layer.num_heads), range(max(0, layer.seen - num_rows), layer.seen)
    return [
        layer.attention(head, t, layer.held[head // layer.layer.group_size])
        for head in heads
        for t in rows
    ]


def cake(budget: Any, layers: Sequence[SlowLayer], entries: int) -> Shares:
    stats = []
    for one in layers:
        rows, num_rows = last_rows(one, budget.cake_window), min(budget.cake_window, one.seen)
        entropy = shift = 0.0
        for start in range(0, len(rows), num_rows):
            for j in range(one.seen - budget.cake_window):
                values = [row.get(j, 0.0) for row in rows[start : start + num_rows]]
                mean = sum(values) / num_rows
                shift += sum((value - mean) ** 2 for value in values) / num_rows
                entropy -= sum(value * math.log(value) for value in values if value > 0)
        stats.append((entropy, shift if shift > 1e-12 else 0.0))
    peaks = [max(column) or 1.0 for column in zip(*stats, strict=True)]
    return even(
        layers,
        [
            (entropy / peaks[0]) ** (1 / budget.tau1) * (shift / peaks[1]) ** (1 / budget.tau2)
            for entropy, shift in stats
        ],
    )


def zigzag(budget: Any, layers: Sequence[SlowLayer], entries: int) -> Shares:
    means = []
    for one in layers:
        counts = []
        for row in last_rows(one, budget.zigzag_window):
            held, wanted, count = 0.0, (budget.zigzag_mass - 1e-6) * sum(row.values()), 0
            for weight in sorted(row.values(), reverse=True):
                if count and held >= wanted:
                    break
                held, count = held + weight, count + 1
            counts.append(count)
        means.append(sum(counts) / len(counts))
    return even(layers, means)


def lazy(budget: Any, layers: Sequence[SlowLayer], entries: int) -> Shares:
    lows, highs, sizes = [], [], []
    for one in layers:
        rows = last_rows(one, budget.lazy_rows)
        edge = {*range(budget.lazy_sinks), *range(one.seen - budget.lazy_recent, one.seen)}
        mass = sum(weight for row in rows for j, weight in row.items() if j in edge) / len(rows)
        high = most(one.layer, one.seen)
        few = min(entries, budget.lazy_sinks + budget.lazy_recent, high)
        for _ in range(one.layer.num_kv_heads):
            is_lazy = mass > budget.lazy_threshold + 1e-6
            lows.append(float(few) if is_lazy else 1.0)
            highs.append(few if is_lazy else high)
            sizes.append(entry_bytes(one.layer))
    total = total_bytes(entries, [one.layer for one in layers], layers[0].seen)
    rows = iter(fill([1.0] * len(lows), lows, highs, sizes, total))
    return [[next(rows) for _ in range(one.layer.num_kv_heads)] for one in layers]


def heads_file(budget: Any, layers: Sequence[SlowLayer], entries: int) -> Shares:
    numbers = json.loads(Path(budget.file).read_text())
    flat = [one for row in numbers for one in row]
    mean, floor = sum(flat) / len(flat), budget.head_floor
    return [[floor + (1 - floor) * one / mean for one in row] for row in numbers]


def retrieval_heads(budget: Any, layers: Sequence[SlowLayer], entries: int) -> Shares:
    numbers, specs = json.loads(Path(budget.file).read_text()), [one.layer for one in layers]
    seen = layers[0].seen
    shares = [
        [min(entries, budget.stream, most(one, seen))] * len(row)
        for one, row in zip(specs, numbers, strict=True)
    ]
    left = total_bytes(entries, specs, seen)
    left -= sum(entry_bytes(one) * sum(row) for one, row in zip(specs, shares, strict=True))
    order = [(-number, at, g) for at, row in enumerate(numbers) for g, number in enumerate(row)]
    for _, at, g in sorted(order):
        size = entry_bytes(specs[at])
        more = min(most(specs[at], seen) - shares[at][g], left / size)
        shares[at][g] += more
        left -= more * size
    return shares


PLANS: dict[str, Callable[[Any, Sequence[SlowLayer], int], Shares]] = {
    "pyramid": pyramid,
    "tiers": tiers,
    "cake": cake,
    "zigzag": zigzag,
    "lazy": lazy,
    "heads_file": heads_file,
    "retrieval_heads": retrieval_heads,
}
"""By name of the layer budget."""


def adaptive(budget: Any) -> Callable[[list[list[Wanted]], Sequence[int]], list[int]]:
    """Lines of kvpress' AdaKVPress: a safe part of each head, then the best of the layer."""

    def share(wanted: list[list[Wanted]], budgets: Sequence[int]) -> list[int]:
        safe = [
            min(len(row), max(1, int(one * budget.safeguard)))
            for row, one in zip(wanted, budgets, strict=True)
        ]
        rest = [(one, -g) for g, row in enumerate(wanted) for one in row[safe[g] :]]
        counts, left = list(safe), sum(budgets) - sum(safe)
        for _, minus_g in sorted(rest, reverse=True)[:left]:
            counts[-minus_g] += 1
        counts[0] += sum(budgets) - sum(counts)
        return counts

    return share


HEADS: dict[str, Callable[[Any], Any]] = {"uniform": lambda budget: None, "adaptive": adaptive}
"""By name of the head budget."""
