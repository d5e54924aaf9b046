"""Replay policies on one recorded sequence at level ``local``: each layer's inputs unchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad

from tracekit.kv.allotment import Allotment
from tracekit.kv.compare import oracle_overlap
from tracekit.kv.engine import NEVER, Engine
from tracekit.kv.entries import Entries
from tracekit.kv.measures import SHARED, Measures
from tracekit.kv.step import step
from tracekit.kv.sweep import sweep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.budget import Cache
    from tracekit.kv.policy import Policy
    from tracekit.kv.reference import Reference
    from tracekit.kv.schedule import Spans


SWEPT_ROWS = 6
"""Rows between decisions from which on they are taken together, head by head."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """What N policies of one family did to L layers of one sequence of T recorded rows.

    Scored rows are R positions, ``first_row`` .. T - 1; all arrays are numpy.

    Parameters
    ----------
    first_row
        The eviction point, from which on rows are scored: without ``evict_prompt`` the first that
        reads the reduced cache.
    full_R
        Entries that the full cache holds at each scored row: min(position + 1, window).
    measures
        What was measured at each scored row, as arrays.
    evicted_at_NLGT
        Tokens seen when the entry of a position was evicted; ``engine.NEVER`` if it stayed (int32).
    oracle_overlap_NLG
        Of as many keys as the first decision left, the part of those that later rows attend to most
        that it left.
    is_clipped_N
        Whether a budget was somewhere smaller than what was to be protected.
    is_clamped_N
        Whether a budget was somewhere larger than what the full cache held (sliding layers, budgets
        in tokens).
    """

    first_row: int
    full_R: np.ndarray
    measures: Measures[np.ndarray]
    evicted_at_NLGT: np.ndarray
    oracle_overlap_NLG: np.ndarray
    is_clipped_N: np.ndarray
    is_clamped_N: np.ndarray

    @property
    def num_evicted_NLG(self) -> np.ndarray:
        """Entries evicted by the end."""
        num_NLG: np.ndarray = (self.evicted_at_NLGT != NEVER).sum(-1)
        return num_NLG

    @property
    def entries(self) -> Entries[np.ndarray]:
        """Counts of entries at each scored row."""
        return Entries(*(getattr(self.measures, name) for name in Entries._fields))

    def since(self, row: int) -> Replay:
        """Return the same with the scored rows from position ``row`` on alone."""
        cut = max(0, row - self.first_row)
        return replace(
            self,
            first_row=self.first_row + cut,
            full_R=self.full_R[cut:],
            measures=Measures(*(array[..., cut:] for array in self.measures)),
        )


@dataclass(frozen=True)
class Family:
    """Policies that differ in their amount alone, and the plan of their layer budget.

    Parameters
    ----------
    policies
        N policies.
    shares
        For each of them, by layer of the cache, the frozen plan (``plan.py``); None where all
        layers and heads get the same.
    """

    policies: tuple[Policy, ...]
    shares: tuple[tuple[torch.Tensor, ...], ...] | None = None

    def parts(self) -> list[Family]:
        """Return the families that an engine takes: one policy each where entries are its own."""
        first = self.policies[0]
        if first.transform is None and first.positions == "original":
            return [self]
        shares = self.shares
        return [
            Family((policy,), None if shares is None else (shares[n],))
            for n, policy in enumerate(self.policies)
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What a replay must know beside the recorded rows.

    Parameters
    ----------
    layers
        Numbers of the L layers of the reference.
    cache
        All layers of the model that hold keys.
    spans
        Where the parts of the sequence end.
    seed
        Of the sequence, for rules that draw.
    """

    layers: tuple[int, ...]
    cache: Cache
    spans: Spans
    seed: int

    def template(self, num_rows: int) -> torch.Tensor:
        """Return bool [T]: tokens of the chat template."""
        template_T = torch.zeros(num_rows, dtype=torch.bool)
        template_T[[t for t in self.spans.template if t < num_rows]] = True
        return template_T


def replay(
    families: Sequence[Family], reference: Reference, setting: Setting
) -> list[Replay | None]:
    """Replay policies; those that decide once at one point share nearly all of the work.

    Parameters
    ----------
    families
        Policies that differ in their amount alone.
    reference
        The recorded rows of L layers.
    setting
        Which layers of which cache, and where the sequence has its parts.

    Returns
    -------
    list of Replay or None
        One a family; None if the sequence has no such eviction point, or no row to score after it.

    Raises
    ------
    UsageError
        If the policies of a family cannot be replayed together.
    InputError
        If a score of a held key is not a number.
    """
    results: dict[int, Replay] = {}
    points = [family.policies[0].schedule.point(setting.spans) for family in families]
    together: dict[tuple[int, ...], list[tuple[int, Engine]]] = {}
    for place, family in enumerate(families):
        policy, point = family.policies[0], points[place]
        if point is None or point >= reference.num_rows:
            continue
        decisions = policy.schedule.decisions(point, setting.spans)
        if policy.is_plain and _is_sparse(decisions, reference.num_rows):
            engine = _open(family, reference, setting, decisions[0])
            together.setdefault(decisions, []).append((place, engine))
        else:
            alone = [_stepped(part, reference, setting, decisions) for part in family.parts()]
            results[place] = _join(alone) if len(alone) > 1 else alone[0]
    for decisions, opened in together.items():
        found = sweep([engine for _, engine in opened], reference, decisions)
        for (place, engine), measures in zip(opened, found, strict=True):
            results[place] = _collect(engine, decisions[0], measures, reference)
    return [
        None if point is None or place not in results else results[place].since(point)
        for place, point in enumerate(points)
    ]


def _is_sparse(decisions: Sequence[int], num_rows: int) -> bool:
    """Return whether enough rows lie between decisions to be worth a pass over the heads."""
    return num_rows - decisions[0] >= SWEPT_ROWS * len(decisions) or len(decisions) == 1


def _open(family: Family, reference: Reference, setting: Setting, point: int) -> Engine:
    """Return the engine of a family, the rows before the first decision taken."""
    policies = family.policies
    kept = [policy.kept for policy in policies if policy.kept is not None]
    engine = Engine(
        reference.layer,
        setting.layers,
        policies,
        allotment=Allotment(setting.cache, kept, family.shares),
        seed=setting.seed,
        rope=reference.rope,
        template_T=setting.template(reference.num_rows),
        future=reference.future,
    )
    accumulators = policies[0].scorer.needs.accumulated
    engine.absorb(*reference.rows(0, point), reference.accumulated(accumulators, point))
    return engine


def _stepped(
    family: Family, reference: Reference, setting: Setting, decisions: Sequence[int]
) -> Replay:
    """Replay a family row by row."""
    point = decisions[0]
    engine = _open(family, reference, setting, point)
    return _collect(engine, point, step(engine, reference, decisions), reference)


def _collect(
    engine: Engine, point: int, measures: Measures[torch.Tensor], reference: Reference
) -> Replay:
    """Return the replay of an engine that has read, or need not read, all rows."""
    num_rows = reference.num_rows
    evicted_at_NLGT = pad(engine.evicted_at_NLGK, (0, num_rows - engine.num_tokens), value=NEVER)
    num_sets = engine.num_sets
    return Replay(
        first_row=point,
        full_R=np.array([engine.layer.entries(t + 1) for t in range(point, num_rows)]),
        measures=Measures(*(array.cpu().numpy() for array in measures)),
        evicted_at_NLGT=evicted_at_NLGT.expand(num_sets, -1, -1, -1).cpu().numpy(),
        oracle_overlap_NLG=oracle_overlap(engine, point, reference).cpu().numpy(),
        is_clipped_N=engine.is_clipped_NL.any(1).numpy(),
        is_clamped_N=engine.is_clamped_NL.any(1).numpy(),
    )


def _join(replays: Sequence[Replay]) -> Replay:
    """Return replays of one policy each as one."""
    measures = [
        arrays[0] if name in SHARED else np.concatenate(arrays)
        for name, arrays in zip(
            Measures._fields, zip(*(one.measures for one in replays), strict=True), strict=True
        )
    ]
    names = ("evicted_at_NLGT", "oracle_overlap_NLG", "is_clipped_N", "is_clamped_N")
    rest: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in replays]) for name in names
    }
    return replace(replays[0], measures=Measures(*measures), **rest)
