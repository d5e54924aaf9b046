"""The state machine of a stack of layers: rows are read, entries leave, nothing comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from tracekit.errors import InputError, UsageError
from tracekit.kv.attend import row_blocks, seen_outputs, seen_weights
from tracekit.kv.choose import Chooser
from tracekit.kv.rows import Rows
from tracekit.kv.select import select
from tracekit.kv.storage import Storage
from tracekit.kv.tier import FastTier
from tracekit.kv.view import Future, View
from tracekit.measure.attention import as_wide, logits_HQK, visible_QK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracekit.kv.accumulate import Accumulator
    from tracekit.kv.budget import Allotment
    from tracekit.kv.policy import Policy
    from tracekit.kv.scorer import Needs
    from tracekit.spec import LayerSpec, RopeSpec

NEVER = torch.iinfo(torch.int32).max
"""In ``evicted_at``: still there."""


class Outcome(NamedTuple):
    """Some rows after they were read.

    Parameters
    ----------
    weights_LGNMQK
        Attention over the keys up to the last of these rows.
    seen_NLGQK
        Entries that each row read.
    fetched_NLGQ
        Entries of these that came from the slow tier; 0 without a tier.
    """

    weights_LGNMQK: torch.Tensor
    seen_NLGQK: torch.Tensor
    fetched_NLGQ: torch.Tensor


class Engine:
    """Layers of one shape under N policies that differ in their amount alone.

    Call ``absorb`` with the rows before the first decision, ``decide``, ``read`` the next rows,
    ``decide`` again where the schedule says so, and so on.

    Parameters
    ----------
    layer
        The spec that the layers share, its index aside.
    layers
        Their L numbers.
    policies
        N policies; N = 1 if entries are transformed or turned.
    allotment
        Entries of each layer and head at each decision.
    seed
        Of the sequence, for rules that draw.
    rope
        Rotary embedding of the layers; None if they have none.
    template_T
        bool, tokens of the chat template; None: no such tokens.
    future
        All rows, for rules that look ahead.

    Raises
    ------
    UsageError
        If the policies differ in more than their amount, or one has none.
    """

    def __init__(
        self,
        layer: LayerSpec,
        layers: Sequence[int],
        policies: Sequence[Policy],
        *,
        allotment: Allotment,
        seed: int,
        rope: RopeSpec | None = None,
        template_T: torch.Tensor | None = None,
        future: Future | None = None,
    ) -> None:
        _check(policies)
        self._num_sets = len(policies)
        self.policy = policies[0]
        self._needs = self.policy.scorer.needs
        self._allotment = allotment
        self.layer = layer
        self._layers = tuple(layers)
        self._seed = seed
        self._rope = rope
        self._template_T = template_T
        self._future = future
        self._query = Rows()
        self._storage = Storage(self.policy, rope)
        self._chooser = Chooser(policies, layer)
        self._fast_tier = None if self.policy.tier is None else FastTier(self.policy.tier)
        self._accumulated: dict[Accumulator, torch.Tensor] = {}
        self.evicted_at_NLGK = torch.zeros(
            (1, len(layers), layer.num_kv_heads, 0), dtype=torch.int32
        )
        self.num_decisions = 0
        self.is_clipped_N = torch.zeros(len(policies), dtype=torch.bool)
        self.is_clamped_N = torch.zeros(len(policies), dtype=torch.bool)

    @property
    def num_tokens(self) -> int:
        """Tokens seen."""
        return self.evicted_at_NLGK.shape[-1]

    @property
    def held_NLGK(self) -> torch.Tensor:
        """Keys that are there, bool: not evicted, nor out of the window. N = 1 before a decision."""
        held_NLGK = self.evicted_at_NLGK == NEVER
        if self.layer.window is not None:
            held_NLGK[..., : -self.layer.window] = False
        return held_NLGK

    @property
    def closed_LGK(self) -> torch.Tensor:
        """Keys that are stored transformed, bool; all False without a transform."""
        return self._storage.closed_LGK

    @property
    def room(self) -> int:
        """Rows that may be read before entries close; a read of more is refused."""
        return self._storage.room(self.held_NLGK)

    def absorb(
        self,
        query_LHQD: torch.Tensor,
        key_LGQD: torch.Tensor,
        value_LGQD: torch.Tensor,
        accumulated: Mapping[Accumulator, torch.Tensor] | None = None,
    ) -> None:
        """Take rows whose outputs nobody needs: those before the first decision.

        Parameters
        ----------
        query_LHQD, key_LGQD, value_LGQD
            Post-RoPE queries, keys and values of the next Q positions.
        accumulated
            What the accumulators have after these rows, if somebody has computed it already.
        """
        self._append(query_LHQD, key_LGQD, value_LGQD)
        if accumulated is not None:
            self._accumulated |= accumulated
        elif self._needs.accumulated:
            for _ in self._attended(query_LHQD):
                pass  # the weights themselves are of no use, what they add up to is taken

    def accumulated(self) -> dict[Accumulator, torch.Tensor]:
        """Return what the accumulators have so far, [N, L, H or G, K]."""
        return dict(self._accumulated)

    def read(
        self, query_LHQD: torch.Tensor, key_LGQD: torch.Tensor, value_LGQD: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Outcome]]:
        """Take rows and yield, block by block, their attention outputs over what they read.

        Parameters
        ----------
        query_LHQD, key_LGQD, value_LGQD
            Post-RoPE queries, keys and values of the next Q positions, at most ``room``.

        Yields
        ------
        tuple
            Outputs [N, L, H, Q, D], float32 or float64, and how they came about.
        """
        self._append(query_LHQD, key_LGQD, value_LGQD)
        for outcome in self._attended(query_LHQD):
            end = outcome.weights_LGNMQK.shape[-1]
            value_LGKD = self._storage.value_LGKD[..., :end, :]
            yield seen_outputs(outcome.weights_LGNMQK, value_LGKD), outcome
        if self.num_decisions:
            self._storage.close(self.held_NLGK)

    def score(self) -> torch.Tensor:
        """Return the scores of all keys as they are now, [N, L, G, K]; axes may be 1.

        They depend on nothing but the scorer and what was read, so that policies that differ in the
        rest may share them.
        """
        return self.policy.scorer.score(self.view(self._needs))

    def decide(self, score_NLGK: torch.Tensor | None = None) -> torch.Tensor:
        """Evict down to the budget of the tokens seen, and return how many left: int64 [N, L, G].

        Parameters
        ----------
        score_NLGK
            What ``score`` gives, if somebody has computed it already.

        Raises
        ------
        InputError
            If a score of a held key is not a number.
        UsageError
            If keys are to stand at their place in the cache and heads hold unequal numbers.
        """
        num_sets, device = self._num_sets, self.evicted_at_NLGK.device
        score_NLGK = self.score() if score_NLGK is None else score_NLGK
        held_NLGK = self.held_NLGK
        self._refuse_nan(score_NLGK, held_NLGK)
        held_NLGK = held_NLGK.expand(num_sets, -1, -1, -1)
        budget_NLG = self._allotment.entries(self.num_tokens, self._layers).to(device)
        kept_NLGK, clipped_NLG = select(
            score_NLGK,
            held_NLGK,
            budget_NLG,
            self.policy.protection,
            self.policy.heads,
            self._template_K(),
        )
        evicted_NLGK = held_NLGK & ~kept_NLGK
        self.evicted_at_NLGK = torch.where(evicted_NLGK, self.num_tokens, self.evicted_at_NLGK)
        self._accumulated = {
            one: state.expand(num_sets, -1, -1, -1).contiguous()
            for one, state in self._accumulated.items()
        }
        self.is_clipped_N |= clipped_NLG.flatten(1).any(1).cpu()
        over_NLG = budget_NLG > self.layer.entries(self.num_tokens)
        self.is_clamped_N |= over_NLG.flatten(1).any(1).cpu()
        if not self.num_decisions:
            self._storage.fit(self.view(self._storage.needs))
        self._chooser.decided(self.view(self._chooser.needs))
        self._storage.turn(self.evicted_at_NLGK != NEVER)
        self._storage.close(self.held_NLGK)
        self.num_decisions += 1
        return evicted_NLGK.sum(-1)

    def view(self, needs: Needs) -> View:
        """Return the state as a rule that declared ``needs`` may see it, and nothing else."""
        last = needs.last_queries
        return View(
            layer=self.layer,
            layers=self._layers,
            seed=self._seed,
            held_NLGK=self.held_NLGK,
            num_decisions=self.num_decisions,
            stored=self._storage.key_LGKD,
            keys=self._storage.unturned_key_LGKD if needs.keys else None,
            values=self._storage.value_LGKD if needs.values else None,
            queries=self._query.all if needs.queries else None,
            last_queries=self._query.all[..., -last:, :] if last else None,
            accumulated=self._accumulated,
            rope=self._rope,
            future=self._future if needs.future else None,
        )

    def _append(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        num_new = key.shape[-2]
        if self.num_decisions and num_new > self.room:
            msg = f"{num_new} rows are more than the {self.room} before entries close."
            raise UsageError(msg)
        self._query.append(as_wide(query))
        self._storage.append(as_wide(key), as_wide(value))
        self.evicted_at_NLGK = pad(self.evicted_at_NLGK.to(key.device), (0, num_new), value=NEVER)
        grown = {one: pad(state, (0, num_new)) for one, state in self._accumulated.items()}
        for one in self._needs.accumulated:
            heads = self.layer.num_heads if one.by_query_head else self.layer.num_kv_heads
            shape = (self.evicted_at_NLGK.shape[0], len(self._layers), heads, self.num_tokens)
            if one not in grown:
                grown[one] = self._storage.key_LGKD.new_zeros(shape)
        self._accumulated = grown

    def _attended(self, query_LHQD: torch.Tensor) -> Iterator[Outcome]:
        """Yield the attention of the newest rows, block by block; what they add up to is taken."""
        num_rows, last = query_LHQD.shape[-2], self.num_tokens
        key_LGKD = self._storage.key_LGKD
        num_sets = max(self.evicted_at_NLGK.shape[0], self._chooser.num_sets)
        row_bytes = num_sets * key_LGKD.element_size() * last * query_LHQD.shape[:2].numel()
        for start, end in row_blocks(last - num_rows, last, row_bytes):
            query = query_LHQD[..., start - last + num_rows : end - last + num_rows, :]
            seen_QK = visible_QK(
                self.layer, end - start, end, first_query=start, device=key_LGKD.device
            )
            here_NLGK = self.evicted_at_NLGK[..., :end] == NEVER
            seen_NLGQK = here_NLGK[..., None, :] & seen_QK
            logits_LHQK = logits_HQK(query, key_LGKD[..., :end, :], self.layer)
            fetched_NLGQ = seen_NLGQK.new_zeros(seen_NLGQK.shape[:-1], dtype=torch.int64)
            if self.num_decisions:
                visible_NLGQK = seen_NLGQK
                seen_NLGQK = self._chooser.choose(
                    self._query.all, key_LGKD, here_NLGK, visible_NLGQK, start
                )
                if self._fast_tier is not None:
                    fetched_NLGQ = self._fast_tier.read(seen_NLGQK, visible_NLGQK, start)
            weights_LGNMQK = seen_weights(logits_LHQK, seen_NLGQK, self.layer)
            for one in self._needs.accumulated:
                state_NLXK = self._accumulated[one][..., :end]
                state_NLXK.copy_(one.add(state_NLXK, weights_LGNMQK, start))
            yield Outcome(weights_LGNMQK, seen_NLGQK, fetched_NLGQ)

    def _template_K(self) -> torch.Tensor:
        """Return which of the tokens seen are of the chat template."""
        num_tokens, device = self.num_tokens, self.evicted_at_NLGK.device
        if self._template_T is None:
            return torch.zeros(num_tokens, dtype=torch.bool, device=device)
        return self._template_T[:num_tokens].to(device)

    def _refuse_nan(self, score_NLGK: torch.Tensor, held_NLGK: torch.Tensor) -> None:
        """Raise if a held key has no number for a score."""
        bad_NLGK = score_NLGK.isnan() & held_NLGK
        if bad_NLGK.any():
            _, layer, head, position = bad_NLGK.nonzero()[0].tolist()
            msg = (
                f"policy {self.policy.family!r} has no score for position {position} in layer "
                f"{self._layers[layer]}, KV head {head}, after {self.num_tokens} tokens (NaN): the "
                "queries, keys or values recorded there are not finite, so leave that layer out."
            )
            raise InputError(msg)


def _check(policies: Sequence[Policy]) -> None:
    """Raise if policies cannot share an engine."""
    first = policies[0]
    if len({policy.family for policy in policies}) != 1 or any(one.is_open for one in policies):
        msg = "policies that are replayed together have one family and an amount each."
        raise UsageError(msg)
    if len(policies) > 1 and (first.transform is not None or first.positions == "cache"):
        msg = "entries that are transformed or turned are replayed one policy at a time."
        raise UsageError(msg)
