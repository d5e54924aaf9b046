"""The numbers of a plan: kept fractions, asked for or measured, and what fits under each."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError, UsageError
from tracekit.measure.memory import CachePlan
from tracekit.report.load import KEY_MEASURES

if TYPE_CHECKING:
    from tracekit.measure.memory import CacheShape
    from tracekit.report.load import Point, Results

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CLAIMED_TOKENS = 8192
"""Eviction is said to pay above about so many tokens."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """What is planned for; weights and longest text are None where they are not known."""

    name: str
    cache: CacheShape
    weight_bytes: float | None
    longest_tokens: int | None
    dtype: str | None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A kept fraction, asked for or measured; what was not measured is None."""

    name: str
    asked_frac: float
    kept_frac: float
    policy: str | None = None
    level: str | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    peak_frac: float | None = None
    cost: float | None = None
    cost_n: int | None = None
    cost_of: str | None = None


def asked(fractions: list[float]) -> list[Kept]:
    """Return kept fractions that nobody measured."""
    return [Kept(name=f"kept {one:g}", asked_frac=one, kept_frac=one) for one in fractions]


def measured(
    results: Results, fractions: list[float], policy: str | None, *, number_bytes: float
) -> list[Kept]:
    """Return what causal policies kept, at the fraction nearest to each that was asked for.

    ``number_bytes`` are planned for; what a policy kept was measured with those of the results.

    Raises
    ------
    InputError
        If the results hold no KV policy.
    UsageError
        If ``policy`` frees no memory there, or does not exist, or what it kept holds for other bytes
        a number alone.
    """
    if not results.levels:
        msg = (
            f"{results.folder} holds no KV policy: run tracekit simulate TRACE -o RESULTS --kv h2o."
        )
        raise InputError(msg)
    # What is kept is the same at all levels; the first one has the most sequences.
    level = results.levels[0]
    curves = results.methods("kv", "kept_frac", level=level)
    chosen = curves if policy is None else _named(curves, policy)
    if not chosen:
        known = ", ".join(sorted(curves)) or "none"
        msg = f"{results.folder} has no policy {policy!r} that frees memory; it has: {known}."
        raise UsageError(msg)
    _refuse_twice(results, chosen, number_bytes)
    peaks = results.means("kv", "peak_frac", level=level)
    costs = _costs(results)
    found = {}
    for curve in chosen.values():
        for wanted in fractions:
            point = min(curve, key=lambda one: (abs(one.asked - wanted), one.x))
            cost = costs.get(point.cell, {})
            found[point.cell] = _kept(point, level, peaks.get(point.cell), cost)
    return list(found.values())


def _refuse_twice(results: Results, chosen: dict[str, list[Point]], number_bytes: float) -> None:
    """Refuse other bytes a number for quantised caches: smaller numbers would count twice."""
    own = results.run["plan"]["kv_bytes"]
    stacked = [name for name, curve in chosen.items() if any("+" in one.name for one in curve)]
    if stacked and number_bytes != own:
        msg = (
            f"--bytes {number_bytes:g} does not go with {', '.join(stacked)}: what a quantised or "
            f"low-rank cache kept was measured beside {own:g} bytes a number; leave out --bytes, or name "
            "another policy with --policy."
        )
        raise UsageError(msg)


def _kept(point: Point, level: str, peak_frac: float | None, cost: dict[str, Any]) -> Kept:
    return Kept(
        name=f"{point.family} {point.asked:.4g}",
        asked_frac=round(point.asked, 6),
        kept_frac=point.mean,
        policy=point.name,
        level=level,
        low=_known(point.low),
        high=_known(point.high),
        n=point.n,
        peak_frac=peak_frac,
        **cost,
    )


def _costs(results: Results) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what each policy costs at the level that says the most."""
    level = results.levels[-1]
    curves = results.curves("kv", KEY_MEASURES[level], level=level)
    return {
        point.cell: {
            "cost": point.mean,
            "cost_n": point.n,
            "cost_of": f"{KEY_MEASURES[level]}, {level}",
        }
        for curve in curves.values()
        for point in curve
    }


def _named(curves: dict[str, list[Point]], policy: str) -> dict[str, list[Point]]:
    """Return the points of a policy by its short name, by its full text, or by a text for it."""
    if policy in curves:
        return {policy: curves[policy]}
    texts = {policy}
    if not any(point.name == policy for curve in curves.values() for point in curve):
        from tracekit.kv.parse import parse

        texts.add(parse(policy).text)
    found = {
        family: [point for point in curve if point.name in texts]
        for family, curve in curves.items()
    }
    return {family: curve for family, curve in found.items() if curve}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def planned(
    model: PlannedModel,
    kept: list[Kept],
    *,
    num_tokens: int,
    memory_bytes: float | None,
    batch: int,
    number_bytes: float,
) -> dict[str, Any]:
    """Return all numbers of a plan, the full cache first."""
    room = None if memory_bytes is None else memory_bytes - (model.weight_bytes or 0)
    rows = []
    for one in [Kept(name="full", asked_frac=1, kept_frac=1), *kept]:
        at = CachePlan(cache=model.cache, bytes_per_number=number_bytes, kept_frac=one.kept_frac)
        peak = dataclasses.replace(at, kept_frac=min(1.0, one.peak_frac or one.kept_frac))
        rows.append(dataclasses.asdict(one) | _row(at, peak, num_tokens, batch, room))
    full = CachePlan(cache=model.cache, bytes_per_number=number_bytes)
    return {
        "model": model.name,
        "dtype": model.dtype,
        "context_tokens": num_tokens,
        "longest_tokens": model.longest_tokens,
        "bytes_per_number": number_bytes,
        "first_token_bytes": full.token_bytes(0) if model.cache.layers else 0.0,
        "next_token_bytes": full.token_bytes(num_tokens),
        "state_bytes": model.cache.state_bytes,
        "weight_bytes": model.weight_bytes,
        "memory_bytes": memory_bytes,
        "room_bytes": room,
        "batch": batch,
        "claimed_tokens": CLAIMED_TOKENS,
        "claimed_cache_bytes": full.request_bytes(CLAIMED_TOKENS),
        "rows": rows,
    }


def _row(
    at: CachePlan, peak: CachePlan, num_tokens: int, batch: int, room: float | None
) -> dict[str, Any]:
    one = at.request_bytes(num_tokens)
    return {
        "request_bytes": one,
        "batches": {str(size): size * one for size in sorted({*BATCHES, batch})},
        "requests": None if room is None else at.requests(num_tokens, room),
        "requests_at_peak": None if room is None else peak.requests(num_tokens, room),
        "longest_tokens": None if room is None else at.longest(batch, room),
    }
