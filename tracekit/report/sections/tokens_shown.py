"""The sequences that a report shows: their tokens, what policies leave of them, what schemes miss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from tracekit import schema
from tracekit.report.frames import read_frame
from tracekit.report.verdict.compared import nearest_asked
from tracekit.report.verdict.schemes import COMPARED_SIZE, with_family

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Point, Results

MOST_TOKENS = 4_000
"""Tokens of a sequence that are shown."""

MOST_POLICIES = 10
MOST_SCHEMES = 6
_KEPT = 0.25  # Policies are shown at the fraction nearest to it.
_FLAGS = ("is_clipped", "is_clamped", "is_idle")


@dataclass(frozen=True, eq=False)
class Left:
    """What a policy left of a sequence.

    Parameters
    ----------
    policy
        It, at one kept fraction.
    point
        The eviction point: tokens seen at the first decision.
    flags
        What is to be said of the cell: clipped, clamped, idle; '' for nothing.
    share
        Mean of ``held_T`` over all positions, those not shown too.
    held_T
        By position shown, the part of the KV heads that hold the entry at the end; NaN where the
        full cache does not hold it, and at the last token, which never enters the cache.
    """

    policy: Point
    point: int
    flags: str
    share: float
    held_T: np.ndarray


@dataclass(frozen=True, eq=False)
class Missed:
    """Steps of a sequence at which a scheme has no candidate for the most likely token.

    Parameters
    ----------
    scheme
        It, at one size.
    missed_T
        By position of the predicted token: 1, 0, or NaN where the scheme was not tried.
    """

    scheme: Point
    missed_T: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class ShownSequence:
    """A sequence: its first ``MOST_TOKENS`` tokens and what became of them.

    Parameters
    ----------
    sequence_id, domain
        Which it is; '' for a domain that is not known.
    num_tokens
        All its tokens, shown or not.
    rows
        Of ``schema.SHOWN``, in order.
    left
        By policy, the one with the smallest error first.
    missed
        By scheme, the one that misses least first.
    """

    sequence_id: str
    domain: str
    num_tokens: int
    rows: pd.DataFrame
    left: tuple[Left, ...]
    missed: tuple[Missed, ...]


def shown_sequences(results: Results) -> tuple[ShownSequence, ...]:
    """Return the sequences of ``schema.SHOWN`` in the order of the run."""
    domains = {row["sequence_id"]: row["domain"] for row in results.run["sequences"]}
    held, flags = _held(results), _flags(results)
    schemes = choose_schemes(results)
    tried = _tried(results, schemes)
    policies = _evicting(choose_policies(results), held)[:MOST_POLICIES]
    made = []
    for sequence_id, rows in results.table(schema.SHOWN).groupby("sequence_id", sort=False):
        name, count = str(sequence_id), min(len(rows), MOST_TOKENS)
        made.append(
            ShownSequence(
                sequence_id=name,
                domain=domains.get(name) or "",
                num_tokens=len(rows),
                rows=rows.sort_values("position").head(count).reset_index(drop=True),
                left=tuple(
                    _left(one, *held[name, one.name], flags.get((name, one.name), ""), count)
                    for one in policies
                    if (name, one.name) in held
                ),
                missed=tuple(
                    Missed(one, _by_position(*tried[name, one.family], count))
                    for one in schemes
                    if (name, one.family) in tried
                ),
            )
        )
    return tuple(made)


def choose_policies(results: Results) -> list[Point]:
    """Return each causal policy at the kept fraction nearest to a quarter, least error first."""
    curves = results.methods("kv", "output_error", level="local")
    nearest = [nearest_asked(curve, _KEPT) for curve in curves.values()]
    return sorted(nearest, key=lambda p: (p.mean, p.family))


def choose_schemes(results: Results) -> list[Point]:
    """Return the schemes a decoder can have that miss least, at the size nearest to 1 024."""
    curves = results.methods("vocab", "hit_argmax")
    points = [point for curve in curves.values() for point in curve if point.x > 0]
    if not points:
        return []
    size = min((point.x for point in points), key=lambda x: (abs(math.log2(x / COMPARED_SIZE)), x))
    there = [point for point in points if point.x == size]
    return sorted(there, key=lambda p: (-p.mean, p.family))[:MOST_SCHEMES]


def _held(results: Results) -> dict[tuple[str, str], tuple[int, np.ndarray]]:
    """Return eviction points and held parts by sequence and policy."""
    rows = results.table(schema.HELD)
    names = ["sequence_id", "policy", "point", "held_frac"]
    return {
        (sequence_id, policy): (int(point), np.asarray(held_frac, dtype=float))
        for sequence_id, policy, point, held_frac in rows[names].itertuples(index=False, name=None)
    }


def _flags(results: Results) -> dict[tuple[str, str], str]:
    """Return what is to be said of a cell at level local, by sequence and policy."""
    rows = results.whole[results.whole["level"] == "local"]
    columns = rows[["sequence_id", "policy", *_FLAGS]].itertuples(index=False, name=None)
    return {
        (sequence_id, policy): ", ".join(
            flag.removeprefix("is_") for flag, is_so in zip(_FLAGS, flags, strict=True) if is_so
        )
        for sequence_id, policy, *flags in columns
    }


def _evicting(
    policies: list[Point], held: dict[tuple[str, str], tuple[int, np.ndarray]]
) -> list[Point]:
    """Return the policies that leave something out somewhere: those of storage alone do not."""
    evicting = {policy for (_, policy), (_, one_T) in held.items() if np.nanmin(one_T) < 1}
    return [policy for policy in policies if policy.name in evicting]


def _left(policy: Point, point: int, held_T: np.ndarray, flags: str, count: int) -> Left:
    padded_T = np.full(count, np.nan)
    padded_T[: len(held_T)] = held_T[:count]
    return Left(policy, point, flags, float(np.nanmean(held_T)), padded_T)


def _tried(
    results: Results, schemes: list[Point]
) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """Return positions and misses by sequence and short name of the scheme."""
    if not schemes:
        return {}
    names = list(results.table(schema.SHOWN)["sequence_id"].unique())
    where = pc.field("sequence_id").isin(names) & (pc.field("size") == round(schemes[0].x))
    columns = ["sequence_id", "estimator", "controller", "fit", "position", "hit_argmax"]
    rows = read_frame(results.folder, schema.CANDIDATES, columns, where)
    told = with_family(results, rows)
    return {
        (str(sequence_id), str(family)): (
            part["position"].to_numpy(),
            1.0 - part["hit_argmax"].to_numpy(dtype=float),
        )
        for (sequence_id, family), part in told.groupby(["sequence_id", "family"], sort=False)
    }


def _by_position(positions: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Return values by position, NaN where there is none."""
    by_position_T = np.full(count, np.nan)
    is_shown = positions < count
    by_position_T[positions[is_shown]] = values[is_shown]
    return by_position_T
