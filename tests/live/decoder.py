"""A decoder whose cache really drops entries: token by token, a slow twin in each layer's place.

The rows before the first decision are one plain pass of the model. Each later row is a pass of one
token, which attends over what its twins hold. What is evicted leaves their sets, and its numbers
are overwritten: nothing is masked, and what came back by mistake would be seen.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests import oracles, oracles_budgets, oracles_key_scores
from tests import oracles_transforms as stored
from tests.kv.cases import TWINS
from tests.kv.test_selectors import CHOICES
from tests.kv.test_storage import slow_store
from tests.live.attending import attending
from tests.oracles_selectors import SlowReader
from tracekit.kv.amounts import Frac
from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS
from tracekit.kv.selector import SELECTORS
from tracekit.kv.transforms.lowrank import LowRank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.schedule import Spans
    from tracekit.model.load import LoadedModel
    from tracekit.spec import LayerSpec, RopeSpec


@dataclass
class Cache(SlowReader, stored.SlowTurned):
    """The cache of one layer: grows row by row, and forgets."""

    def grow(self, *rows: np.ndarray) -> None:
        """Take queries, keys and values [H or G, Q, D] of new rows, which are still to be read."""
        arrays = self.query_HTD, self.key_GTD, self.value_GTD
        self.query_HTD, self.key_GTD, self.value_GTD = (
            np.concatenate(pair, axis=1) for pair in zip(arrays, rows, strict=True)
        )

    def forget(self) -> None:
        """Overwrite what is not held; selectors note channels and bounds of it before it leaves."""
        if self.choose is None:
            for g, held in enumerate(self.held):
                gone = sorted(set(range(self.seen)) - held)
                self.key_GTD[g, gone] = self.value_GTD[g, gone] = np.nan


@dataclass(frozen=True)
class Decoded:
    """Final hidden states [R, E] of the rows from the first decision on, and who left when.

    ``evicted_at`` has, by layer and KV head, the tokens seen when each evicted position left;
    ``held`` the positions that are there after each decision.
    """

    hidden_RE: torch.Tensor
    evicted_at: list[list[dict[int, int]]]
    held: dict[int, list[list[set[int]]]]


class Decoder:
    """A model of float64 under one policy, teacher-forced.

    Parameters
    ----------
    loaded
        The model: one sequence, all layers with keys of their own.
    policy
        Of ``tests.kv.cases.TWINS``, with a kept amount.
    spans
        Where the parts of the sequence end.
    """

    def __init__(self, loaded: LoadedModel, policy: Policy, spans: Spans) -> None:
        self._model, self._policy, self._spans = loaded.model, policy, spans
        point = policy.schedule.point(spans)
        assert point is not None
        self._due = policy.schedule.decisions(point, spans)
        self._first = self._due[0]
        self._specs = loaded.spec.layers
        self._ropes = [
            None if one.rope is None else loaded.spec.ropes[one.rope] for one in self._specs
        ]
        self.caches = [self._open(*pair) for pair in zip(self._specs, self._ropes, strict=True)]
        self._shares: oracles_budgets.Shares | None = None

    def run(self, ids: Sequence[int]) -> Decoded:
        """Decode all rows of a sequence."""
        rows, held = [], {}
        with attending(self._model, self._attend), turning(self._ropes[0]), torch.no_grad():
            self._forward(ids[: self._first], 0)
            for t in range(self._first, len(ids)):
                if t in self._due:
                    self._decide(t)
                    held[t] = [[set(one) for one in cache.held] for cache in self.caches]
                rows.append(self._forward(ids[t : t + 1], t))
                for cache in self.caches:
                    cache.close()
        return Decoded(torch.cat(rows), [cache.evicted_at for cache in self.caches], held)

    def _open(self, layer: LayerSpec, rope: RopeSpec | None) -> Cache:
        read = getattr(self._policy.selector, "read", None) or Frac(1.0)
        return Cache(
            layer,
            query_HTD=np.zeros((layer.num_heads, 0, layer.head_dim)),
            key_GTD=np.zeros((layer.num_kv_heads, 0, layer.head_dim)),
            value_GTD=np.zeros((layer.num_kv_heads, 0, layer.value_dim)),
            rope=rope if self._policy.positions == "cache" else None,
            first_decision=self._first,
            budgets=[
                max(1, oracles.entries(read.amount, read.unit, t + 1))
                for t in range(self._spans.num_rows)
            ],
        )

    def _forward(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """Return final hidden states [Q, E] of some rows."""
        position_1Q = torch.arange(start, start + len(ids))[None]
        decoder = self._model.get_decoder()
        output = decoder(input_ids=torch.tensor([ids]), position_ids=position_1Q, use_cache=False)
        hidden_QE: torch.Tensor = output[0][0]
        return hidden_QE

    def _attend(
        self, layer: int, query_1HQD: torch.Tensor, key_1GQD: torch.Tensor, value_1GQD: torch.Tensor
    ) -> torch.Tensor | None:
        cache = self.caches[layer]
        # A copy: the twin's arrays are written to.
        cache.grow(*(x[0].numpy().copy() for x in (query_1HQD, key_1GQD, value_1GQD)))
        outputs_QHD = [cache.step() for _ in range(query_1HQD.shape[2])]
        if cache.seen <= self._first:
            return None
        return torch.from_numpy(np.array(outputs_QHD)).transpose(0, 1)[None]

    def _decide(self, t: int) -> None:
        """Evict in all layers, which have seen the rows before t."""
        if t == self._first:
            self._settle()
        policy = self._policy
        assert policy.kept is not None
        budget = max(1, oracles.entries(policy.kept.amount, policy.kept.unit, t))
        budgets_LG = [[budget] * layer.num_kv_heads for layer in self._specs]
        if self._shares is not None:
            budgets_LG = oracles_budgets.share_out(self._shares, budget, self._specs, t)
        scores, protection = TWINS[policy.name](policy.scorer), policy.protection
        share = oracles_budgets.HEADS[HEAD_BUDGETS.name_of(type(policy.heads))](policy.heads)
        recent = protection.recent
        for cache, budgets in zip(self.caches, budgets_LG, strict=True):
            newest = [oracles.entries(recent.amount, recent.unit, one) for one in budgets]
            newest = [max(one, protection.grace) for one in newest]
            cache.decide(scores, budgets, protection.sinks, newest, share)
            cache.close()
            cache.forget()

    def _settle(self) -> None:
        """Fix at the first decision what is fixed then: shares of layers, bases, selectors."""
        policy = self._policy
        if not policy.layers.is_uniform:
            assert policy.kept is not None
            budget = max(1, oracles.entries(policy.kept.amount, policy.kept.unit, self._first))
            plan = oracles_budgets.PLANS[LAYER_BUDGETS.name_of(type(policy.layers))]
            self._shares = plan(policy.layers, self.caches, budget)
        for cache, rope in zip(self.caches, self._ropes, strict=True):
            if policy.transform is not None:
                cache.residual = policy.transform.residual
                cache.together = policy.transform.num_together
                cache.stores = _stores(policy, cache, rope)
            if policy.selector is not None:
                cache.choose = CHOICES[SELECTORS.name_of(type(policy.selector))](policy.selector)


def _stores(policy: Policy, cache: Cache, rope: RopeSpec | None) -> list[stored.Store]:
    """Return what stores the entries of each KV head; bases are of the rows seen so far."""
    transform, num_heads = policy.transform, cache.layer.num_kv_heads
    if not isinstance(transform, LowRank):
        return [slow_store(policy)] * num_heads
    heads = {
        "head": [slice(g, g + 1) for g in range(num_heads)],
        "layer": [slice(None)] * num_heads,
    }
    rank = transform.rank.of(cache.layer.head_dim)
    return [
        stored.low_rank(cache.key_GTD[one], cache.value_GTD[one], rank, rope)
        for one in heads[transform.basis]
    ]


@contextmanager
def turning(rope: RopeSpec | None) -> Iterator[None]:
    """Let the twins of scores turn as a model does; in their own tests they turn by 1 radian."""

    def turn(position: float, size: int) -> np.ndarray:
        if rope is None:
            return np.eye(size)
        return np.array([stored.turned(row, position, rope) for row in np.eye(size)]).T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracles_key_scores, "turn", turn)
        yield
