"""Slow, obvious twins of what attention says of the next token: one row, one key, one set at a time.

A row is a dictionary from the position of a key to its attention; what is not seen is not in it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[int, float]

TOPS = (1, 8, 64)


def context(row: Row) -> Row:
    """Return a row without key 0, scaled to 1; all 0 where nothing is left."""
    rest = {j: a for j, a in row.items() if j != 0}
    total = sum(rest.values())
    return {j: a / total if total > 0 else 0.0 for j, a in rest.items()}


def mass_by_token(row: Row, ids: Sequence[int]) -> dict[int, float]:
    """Return the mass of each distinct token of a context."""
    mass: dict[int, float] = {}
    for j, a in row.items():
        mass[ids[j]] = mass.get(ids[j], 0.0) + a
    return mass


def rank(mass: dict[int, float], token: int) -> int:
    """Return how many tokens have at least as much mass, the token itself included."""
    return sum(1 for one in mass.values() if one >= mass[token])


def forecast(row: Row, ids: Sequence[int], t: int) -> dict[str, float]:
    """Return what the context of row t says of token t + 1; what does not apply is not there."""
    mass, token = mass_by_token(row, ids), ids[t + 1]
    found: dict[str, float] = {"distinct_tokens": len(mass), "copied_frac": float(token in mass)}
    for k in TOPS:
        found[f"top_{k}_hit_all"] = 0.0
    if token in mass:
        place = rank(mass, token)
        found |= {
            "next_mass": mass[token],
            "chance_mass": sum(1 for j in row if ids[j] == token) / len(row),
            "rank": place,
            "reciprocal_rank": 1 / place,
        }
        for k in TOPS:
            found[f"top_{k}_hit"] = found[f"top_{k}_hit_all"] = float(place <= k)
    places = [j for j in row if ids[j - 1] == ids[t]]
    found["repeated_frac"] = float(len(places) > 0)
    if places:
        found["induction_mass"] = sum(row[j] for j in places)
        found["induction_chance"] = len(places) / len(row)
        found["induction_hit"] = float(token in [ids[j] for j in places])
    return found


def over_rows(rows: dict[int, Row], ids: Sequence[int]) -> dict[str, float]:
    """Return the numbers of one head: means over the rows where they apply, the median rank."""
    each = [forecast(context(row), ids, t) for t, row in rows.items()]
    found = {}
    for name in {name for one in each for name in one}:
        values = [one[name] for one in each if name in one]
        middle = "rank_median" if name == "rank" else name
        found[middle] = float(np.median(values)) if name == "rank" else sum(values) / len(values)
    return found


def anchors(rows: Sequence[Row], k: int) -> set[int] | None:
    """Return the k keys to which the mean of some heads' rows attends most; None of k or fewer."""
    contexts = [context(row) for row in rows]
    mean = {j: sum(one[j] for one in contexts) / len(contexts) for j in contexts[0]}
    if len(mean) <= k:
        return None
    return set(sorted(mean, key=lambda j: (np.float32(mean[j]), j), reverse=True)[:k])


def overlap(one: set[int], other: set[int]) -> float:
    """Return common keys over all keys."""
    return len(one & other) / len(one | other)


def bucket(num_seen: int) -> tuple[int, int]:
    """Return the fewest and the most tokens seen of a bucket: 1-64, 65-128, 129-256 ..."""
    first, last = 1, 64
    while num_seen > last:
        first, last = last + 1, 2 * last
    return first, last


def drift(
    sets: dict[int, set[int] | None], scored: Sequence[int], prompt_end: int | None
) -> dict[tuple[int, int], dict[str, float]]:
    """Return how anchors move, by bucket; ``sets`` are those of scored rows and of rows before."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for place in sorted({bucket(t + 1) for t in scored if sets[t] is not None}):
        rows = {t: own for t in scored if (own := sets[t]) is not None and bucket(t + 1) == place}
        numbers: dict[str, float] = {"num_scored": len(rows)}
        for lag in (1, 16):
            pairs = [(own, sets.get(t - lag)) for t, own in rows.items()]
            values = [overlap(own, before) for own, before in pairs if before is not None]
            numbers[f"overlap_{lag}"] = sum(values) / len(values) if values else math.nan
            numbers[f"drift_{lag}"] = 1 - numbers[f"overlap_{lag}"]
        ages = [t - j for t, own in rows.items() for j in own]
        numbers["age_tokens"] = sum(ages) / len(ages)
        numbers["prompt_frac"] = math.nan
        if prompt_end is not None:
            old = [j < prompt_end for own in rows.values() for j in own]
            numbers["prompt_frac"] = sum(old) / len(old)
        found[place] = numbers
    return found
