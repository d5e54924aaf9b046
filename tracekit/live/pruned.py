"""A family of policies as the attention of a model: an engine a layer, amounts side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tracekit.errors import UsageError
from tracekit.kv.allotment import Allotment
from tracekit.kv.engine import Engine
from tracekit.kv.entries import Entries, count_entries, entries_of_history
from tracekit.kv.scorer import Needs
from tracekit.live.shared import attend_held

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Family, Setting
    from tracekit.kv.scorer import Scorer
    from tracekit.kv.view import Future
    from tracekit.live.run import FullRun
    from tracekit.spec import LayerSpec, ModelSpec

    Scores = dict[tuple[int, Scorer, int], torch.Tensor]


class Pruned:
    """Attention of the rows after the first decision of B policies, as B runs (see ``drive``).

    Policies of a family differ in their amount alone: what they store and what their rows read
    differs, so each is a run of its own; rows before the first decision are shared.

    Parameters
    ----------
    run
        The sequence under the full cache.
    family
        B policies; one where they choose what rows read.
    setting
        Where the sequence has its parts; its ``layers`` play no part.
    scores
        What other families have scored at their first decisions, [1, 1, G, K] by layer, scorer and
        tokens seen; added to. The prompt is the same for all.
    jitter
        Part of a score by which it is moved up or down at random, by the sequence's seed: a
        rounding of the model's type tells how much of a result is rounding. Scores that are made of
        nothing that the model computes stay as they are. 0: none.

    Raises
    ------
    UsageError
        If the sequence has no such eviction point, if policies that choose come together, or if the
        model cannot hold entries as the policy wants them.
    """

    def __init__(
        self,
        run: FullRun,
        family: Family,
        setting: Setting,
        *,
        scores: Scores | None = None,
        jitter: float = 0.0,
    ) -> None:
        policy = family.policies[0]
        self._run, self._family, self._setting, self._policy = run, family, setting, policy
        self._scores: Scores = {} if scores is None else scores
        self._jitter = 0.0 if policy.scorer.needs == Needs() else jitter
        self._draw = torch.Generator().manual_seed(setting.seed)
        point = policy.schedule.point(setting.spans)
        self.decisions = () if point is None else policy.schedule.decisions(point, setting.spans)
        if not self.decisions:
            msg = f"{policy.family} never decides on this sequence."
            raise UsageError(msg)
        self._owners = _owners(run.spec)
        _refuse(family, run.spec)
        kept = [one.kept for one in family.policies if one.kept is not None]
        self._allotment = Allotment(setting.cache, kept, family.shares)
        self._engines: dict[int, Engine] = {}
        self.evicted_at: dict[int, torch.Tensor] = {}
        self.entries: dict[int, Entries[torch.Tensor]] = {}
        self.is_clipped_B = torch.zeros(self.num_runs, dtype=torch.bool)
        self._clamped_B = torch.zeros(self.num_runs, dtype=torch.bool)

    @property
    def first_row(self) -> int:
        """Position of the first row that is run: the first that reads a reduced cache."""
        return self.decisions[0]

    @property
    def num_runs(self) -> int:
        """B."""
        return len(self._family.policies)

    @cached_property
    def first_layer(self) -> int:
        """The lowest layer in which anything may change; those below are as in the full run."""
        layers = self._run.spec.layers
        if self._owners or not self._policy.is_plain:
            return 0
        changed = (
            one.index
            for one in layers
            if one.holds_keys and any(bool((over < 0).any()) for over in self._over(one))
        )
        return next(changed, len(layers) - 1)

    @property
    def is_clamped_B(self) -> torch.Tensor:
        """Whether a budget was somewhere larger than what the full cache held."""
        return self._clamped_B | self._clamped_below_B

    @cached_property
    def _clamped_below_B(self) -> torch.Tensor:
        """The same of the layers that are not run."""
        below = [one for one in self._run.spec.layers[: self.first_layer] if one.holds_keys]
        clamped_B = torch.zeros_like(self._clamped_B)
        for over_B1G in (over for one in below for over in self._over(one)):
            clamped_B |= (over_B1G > 0).flatten(1).any(-1)
        return clamped_B

    def _over(self, layer: LayerSpec) -> Iterator[torch.Tensor]:
        """Yield by how much budgets are larger than what the full cache holds, [B, 1, G]."""
        for seen in self.decisions:
            yield self._allotment.entries(seen, [layer.index]) - layer.entries(seen)

    def attend(
        self,
        layer: int,
        query_BHQD: torch.Tensor,
        key_BGQD: torch.Tensor,
        value_BGQD: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs of the rows of one layer, decisions in between."""
        spec = self._run.spec.layers[layer]
        if spec.owner is not None:
            keys, values = self._engines[spec.owner].stored
            return attend_held(query_BHQD, keys, values, self.evicted_at[spec.owner], spec)
        engine, outputs, entries = self._open(layer), [], []
        stops = [*self.decisions, self._run.num_rows]
        for start, end in pairwise(stops):
            engine.decide(self._score(engine, layer))
            rows = slice(start - self.first_row, end - self.first_row)
            new = [one[..., rows, :] for one in (query_BHQD, key_BGQD, value_BGQD)]
            if self._policy.is_plain:
                outputs.append(engine.attend(*new))
                continue
            for output_1BHQD, outcome in engine.run(*new):
                outputs.append(output_1BHQD[0])
                entries.append(count_entries(engine, outcome))
        self._close(engine, layer, entries)
        return torch.cat(outputs, dim=-2)

    def _score(self, engine: Engine, layer: int) -> torch.Tensor:
        """Return the scores of a decision, those of the first one once for all families."""
        if engine.num_decisions:
            score_NLGK = engine.score()
        else:
            key = (layer, self._policy.scorer, engine.num_tokens)
            if key not in self._scores:
                self._scores[key] = self._engine(layer, self._family.policies[:1]).score()
            score_NLGK = self._scores[key]
        if not self._jitter:
            return score_NLGK
        sign_NLGK = torch.randint(2, score_NLGK.shape, generator=self._draw) * 2 - 1
        return score_NLGK * (1 + self._jitter * sign_NLGK.to(score_NLGK))

    def _open(self, layer: int) -> Engine:
        engine = self._engine(layer, self._family.policies)
        if layer in self._owners:
            self._engines[layer] = engine
        return engine

    def _engine(self, layer: int, policies: Sequence[Policy]) -> Engine:
        """Return the engine of a layer with the rows before the first decision, one run a policy."""
        reference, setting, num_runs = self._run.references[layer], self._setting, len(policies)
        engine = Engine(
            reference.layer,
            (layer,) * num_runs,
            policies[:1],
            allotment=_SideBySide(self._allotment),
            seed=setting.seed,
            rope=reference.rope,
            template_T=setting.template(reference.num_rows),
            future=_repeated(reference.future, num_runs),
        )
        accumulators = self._policy.scorer.needs.accumulated
        accumulated = reference.accumulated(accumulators, self.first_row)
        query, key, value = (
            one.expand(num_runs, -1, -1, -1) for one in reference.rows(0, self.first_row)
        )
        states = {one: state.expand(-1, num_runs, -1, -1) for one, state in accumulated.items()}
        engine.absorb(query, key, value, states)
        return engine

    def _close(self, engine: Engine, layer: int, entries: list[Entries[torch.Tensor]]) -> None:
        """Keep what is wanted of an engine whose rows are done."""
        evicted_at_BGK = engine.evicted_at_NLGK[0]
        num_rows = self._run.num_rows - self.first_row
        self.evicted_at[layer] = evicted_at_BGK
        if self._policy.is_plain:
            entries = [entries_of_history(evicted_at_BGK[None], engine.layer, num_rows)]
        self.entries[layer] = Entries(
            *(torch.cat(parts, dim=-1) for parts in zip(*entries, strict=True))
        )
        self.is_clipped_B |= engine.is_clipped_NL[0]
        self._clamped_B |= engine.is_clamped_NL[0]


class _SideBySide:
    """An allotment of B policies of a single layer, as that of B layers under a single policy."""

    def __init__(self, allotment: Allotment) -> None:
        self._allotment = allotment

    def entries(self, num_tokens: int, layers: Sequence[int]) -> torch.Tensor:
        """Return int64 [1, B, G]."""
        return self._allotment.entries(num_tokens, layers[:1]).transpose(0, 1)


def _repeated(future: Future, num_runs: int) -> Future:
    """Return the rows to come of one layer as those of so many layers, which they all are."""
    names = ("query_LHTD", "key_LGTD", "value_LGTD", "influence_LPHRD")
    rows = ((name, getattr(future, name)) for name in names)
    return replace(future, **{name: one.expand(num_runs, *one.shape[1:]) for name, one in rows})


def _owners(spec: ModelSpec) -> frozenset[int]:
    """Return the layers whose keys others read."""
    return frozenset(one.owner for one in spec.layers if one.owner is not None)


def _refuse(family: Family, spec: ModelSpec) -> None:
    """Raise if the policies of a family cannot be run in a model, or not together."""
    policy = family.policies[0]
    why = None
    if policy.selector is not None and len(family.policies) > 1:
        why = "it chooses what rows read, so give its amounts one by one."
    if _owners(spec) and not policy.is_plain:
        why = (
            f"layers of {spec.name} read the keys of others, which hold them as they were written; "
            "leave out what is stacked with it."
        )
    # Layers without a rotary embedding in a model of learned positions hold them in the keys.
    if policy.positions == "cache" and not spec.ropes and spec.max_positions:
        why = f"positions=cache turns rotary keys, and {spec.name} has none."
    if why is not None:
        msg = f"{policy.family}: {why}"
        raise UsageError(msg)
