"""KV eviction inside the model on one recorded sequence: level propagated.

A sequence is run once under the full cache. Each family runs only the rows after its eviction
point, all layers together, and is compared with the full run step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from tracekit.errors import ModelError
from tracekit.kv.engine import NEVER
from tracekit.kv.entries import Entries, entries_of_history
from tracekit.kv.parse import parse
from tracekit.kv.replay import Family
from tracekit.live.driver import drive, runs_at_once
from tracekit.live.planned import planned
from tracekit.live.pruned import Pruned
from tracekit.measure.conventions import convention_of
from tracekit.simulate.accounts import Accounts, mean_of
from tracekit.simulate.kv import result_rows
from tracekit.simulate.logit_rows import logit_rows
from tracekit.simulate.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.live.pruned import Scores
    from tracekit.live.run import FullRun
    from tracekit.measure.token_rows import NextToken
    from tracekit.simulate.question import Tables
    from tracekit.simulate.rerun import Rerun, Scored
    from tracekit.simulate.steps import Steps
    from tracekit.spec import LayerSpec

HALF = 1e-4
"""Rounding above which a type is one of half precision."""

LOOSE, ROUNDINGS = 1e-2, 32
"""Part by which hidden states of later rows alone may differ from the whole run's: of their norm,
or in roundings of the model's type, whichever is more."""


def run_through(
    rerun: Rerun, families: Mapping[str, Sequence[Policy]], convention: str
) -> Iterator[tuple[str, Callable[[], Tables]]]:
    """Yield, family by family, its name and what computes its rows.

    Families that decide nothing on this sequence (no such eviction point, no row to score after
    it) are left out.

    Parameters
    ----------
    rerun
        The sequence under the full cache.
    families
        Policies by name; those of one family differ in the amount alone.
    convention
        How next-token distributions are compared: ``tracekit`` or ``llama.cpp``.

    Yields
    ------
    tuple
        What is called returns rows of ``schema.KV_RESULTS`` and ``schema.LOGITS``; it raises what
        is wrong with this family.
    """
    points: dict[int, list[str]] = {}
    for name, family in families.items():
        point = family[0].schedule.point(rerun.setting.spans)
        if point is not None and family[0].schedule.decisions(point, rerun.setting.spans):
            points.setdefault(point, []).append(name)
    scores: Scores = {}
    for point, names in points.items():
        scored = rerun.scored(point, convention_of(convention))
        if scored is None:
            continue
        # Families of one point are compared with the same rows: held only while they are at it.
        after = _AfterPoint(rerun, scored, point, scores)
        for name in names:
            yield name, partial(after.tables, families[name])


class _Ran(NamedTuple):
    """A policy that was run: which of the runs of a batch it is, and what its steps gave."""

    policy: Policy
    pruned: Pruned
    number: int
    steps: NextToken
    noise_R: np.ndarray


class _AfterPoint:
    """The rows after one eviction point, under any number of families."""

    def __init__(self, rerun: Rerun, scored: Scored, point: int, scores: Scores) -> None:
        self._rerun, self._scored, self._point, self._scores = rerun, scored, point, scores
        self._rounding = torch.finfo(getattr(torch, rerun.run.spec.dtype)).eps
        # The full cache through the same path: how much of a result is the path itself.
        full = Pruned(rerun.run, Family((parse(f"full:at={point}"),)), rerun.setting)
        hidden_RE = drive(rerun.run, full, point)[0]
        _refuse_unlike(rerun.run, hidden_RE, max(LOOSE, ROUNDINGS * self._rounding))
        self._floor = scored.compare(hidden_RE)

    def tables(self, family: Sequence[Policy]) -> Tables:
        """Return the rows of the policies of a family."""
        parts = [self._tables(ran) for batch in self._batches(family) for ran in self._run(batch)]
        return {name: pa.concat_tables(part[name] for part in parts) for name in ("kv", "logits")}

    def _batches(self, family: Sequence[Policy]) -> Iterator[Sequence[Policy]]:
        """Yield policies that run side by side, as many as memory is meant for."""
        schedule, spans = family[0].schedule, self._rerun.setting.spans
        num_rows = self._rerun.run.num_rows - schedule.decisions(self._point, spans)[0]
        size = 1 if family[0].selector is not None else runs_at_once(num_rows)
        for start in range(0, len(family), size):
            yield family[start : start + size]

    def _run(self, policies: Sequence[Policy]) -> Iterator[_Ran]:
        """Yield what each of some policies gave, run side by side."""
        run, setting = self._rerun.run, self._rerun.setting
        family = planned(run, policies, setting)
        pruned = Pruned(run, family, setting, scores=self._scores)
        floor_R = self._floor.kl_nats
        hidden_BRE, noise_BR = _drive(run, pruned), [floor_R] * len(policies)
        if self._rounding > HALF:  # what one rounding of a score changes is told of each cell
            moved = Pruned(run, family, setting, scores=self._scores, jitter=self._rounding)
            pairs = zip(hidden_BRE, _drive(run, moved), strict=True)
            noise_BR = [np.maximum(floor_R, self._scored.between(*pair).kl_nats) for pair in pairs]
        for number, policy in enumerate(policies):
            steps = self._scored.compare(hidden_BRE[number])
            yield _Ran(policy, pruned, number, steps, noise_BR[number])

    def _tables(self, ran: _Ran) -> Tables:
        recorded, cache = self._rerun.recorded, self._rerun.setting.cache
        tally = Tally()
        for layer in cache.layers:
            accounts = Accounts(
                [ran.policy],
                [layer],
                self._held(ran, layer),
                point=self._point,
                needle_T=recorded.needle_T,
                bytes_per_number=cache.bytes_per_number,
            )
            tally.add(accounts, 0)
        tallied = tally.columns()
        means = [_means(ran, steps) for steps in tallied.buckets]
        for name in means[0]:
            column = np.full(tallied.columns["kept_frac"].shape, np.nan)
            column[:, -1] = [one[name] for one in means]  # of all layers together
            tallied.columns[name] = column
        kv = result_rows(ran.policy, "propagated", tally, tallied, recorded, cache)
        return {"kv": kv, "logits": logit_rows(self._rerun, ran.policy, ran.steps, self._point)}

    def _held(self, ran: _Ran, layer: LayerSpec) -> _Held:
        """Return what one policy held of a layer at the scored rows."""
        pruned, number, first = ran.pruned, ran.number, self._scored.first_row
        skipped, num_rows = first - pruned.first_row, self._rerun.run.num_rows
        entries = pruned.entries.get(layer.index)
        if entries is None:  # a layer below the first that changes: all of it is there
            evicted_at_BGT = torch.full(
                (number + 1, layer.num_kv_heads, num_rows), NEVER, dtype=torch.int32
            )
            entries = entries_of_history(evicted_at_BGT[None], layer, num_rows - pruned.first_row)
        else:
            evicted_at_BGT = pruned.evicted_at[layer.index]
        return _Held(
            first_row=first,
            full_R=np.array([layer.entries(t + 1) for t in range(first, num_rows)]),
            entries=Entries(
                *(one[:, number : number + 1, :, skipped:].cpu().numpy() for one in entries)
            ),
            evicted_at_NLGT=evicted_at_BGT[None, number : number + 1].cpu().numpy(),
            is_clipped_N=pruned.is_clipped_B[number : number + 1].numpy(),
            is_clamped_N=pruned.is_clamped_B[number : number + 1].numpy(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """What one policy held of one layer; see ``accounts.Held``."""

    first_row: int
    full_R: np.ndarray
    entries: Entries[np.ndarray]
    evicted_at_NLGT: np.ndarray
    is_clipped_N: np.ndarray
    is_clamped_N: np.ndarray


def _refuse_unlike(run: FullRun, hidden_RE: torch.Tensor, most: float) -> None:
    """Raise ``ModelError`` if later rows under the full cache are not those of the whole run."""
    full_RE = run.hidden_TE[-len(hidden_RE) :].double()
    if (hidden_RE.double() - full_RE).norm() > most * full_RE.norm():
        msg = (
            f"{run.spec.name} holds a state that is no cache entry: its later rows depend on more "
            "than keys and values, so eviction cannot be run inside it; use --level local."
        )
        raise ModelError(msg)


def _drive(run: FullRun, pruned: Pruned) -> torch.Tensor:
    return drive(
        run,
        pruned,
        pruned.first_row,
        num_runs=pruned.num_runs,
        first_layer=pruned.first_layer,
    )


def _means(ran: _Ran, steps: Steps) -> dict[str, float]:
    """Return the means over some scored steps that have a distribution; NaN if none has."""
    found = {
        "kl_nats": ran.steps.kl_nats,
        "jsd_nats": ran.steps.jsd_nats,
        "nll_full": ran.steps.nll_full,
        "nll_pruned": ran.steps.nll_pruned,
        "same_top_frac": np.where(ran.steps.has_distribution, ran.steps.same_top, np.nan),
        "noise_kl_nats": ran.noise_R,
    }
    return {name: float(mean_of(values[steps.rows])) for name, values in found.items()}
