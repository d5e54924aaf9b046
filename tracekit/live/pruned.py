"""A family of policies as the attention of a model's layers: an engine a layer, budgets as a batch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tracekit.kv.allotment import Allotment
from tracekit.kv.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.replay import Family, Setting
    from tracekit.kv.scorer import Scorer
    from tracekit.live.run import FullRun


class BatchAllotment:
    def __init__(self, allotment: Allotment) -> None:
        self._allotment = allotment

    def entries(self, num_tokens: int, layers: Sequence[int]) -> torch.Tensor:
        return self._allotment.entries(num_tokens, layers[:1]).transpose(0, 1)


class Pruned:
    def __init__(self, run: FullRun, family: Family, setting: Setting) -> None:
        self._run, self._family, self._setting = run, family, setting
        policy = family.policies[0]
        point = policy.schedule.point(setting.spans)
        self.decisions = policy.schedule.decisions(point, setting.spans)
        self.engines = {}

    def attend(self, layer, query_BHQD, key_BGQD, value_BGQD):
        engine = self._open(layer)
        outputs = []
        first = self.decisions[0]
        for start, end in pairwise([*self.decisions, self._run.num_rows]):
            engine.decide()
            rows = (
                x[..., start - first : end - first, :] for x in (query_BHQD, key_BGQD, value_BGQD)
            )
            outputs.append(engine.outputs(*rows)[0])
        return torch.cat(outputs, dim=-2)

    def _open(self, layer: int) -> Engine:
        reference, setting, policies = (
            self._run.references[layer],
            self._setting,
            self._family.policies,
        )
        kept = [one.kept for one in policies if one.kept is not None]
        engine = Engine(
            reference.layer,
            (layer,) * len(policies),
            policies[:1],
            allotment=BatchAllotment(Allotment(setting.cache, kept, self._family.shares)),
            seed=setting.seed,
            rope=reference.rope,
            template_T=setting.template(reference.num_rows),
            future=reference.future,
        )
        first = self.decisions[0]
        needs = policies[0].scorer.needs
        B = len(policies)
        rows = (x.expand(B, -1, -1, -1) for x in reference.rows(0, first))
        acc = {
            k: v.expand(-1, B, -1, -1)
            for k, v in reference.accumulated(needs.accumulated, first).items()
        }
        engine.absorb(*rows, acc)
        return engine
