"""The state machine of a stack of layers: rows are read, entries leave, nothing comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.errors import UsageError
from tracekit.kv.attend import seen_outputs
from tracekit.kv.gathered import gathered, gathered_rows
from tracekit.kv.reader import Outcome, Reader
from tracekit.kv.refusals import refuse_nan, refuse_places, refuse_unlike
from tracekit.kv.select import select
from tracekit.kv.totals import Totals
from tracekit.kv.view import Future, View
from tracekit.measure.attention import as_wide

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracekit.kv.accumulate import Accumulator
    from tracekit.kv.allotment import Entitlement
    from tracekit.kv.policy import Policy
    from tracekit.kv.scorer import Needs
    from tracekit.spec import LayerSpec, RopeSpec

NEVER = torch.iinfo(torch.int32).max
"""In ``evicted_at``: still there."""


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
        allotment: Entitlement,
        seed: int,
        rope: RopeSpec | None = None,
        template_T: torch.Tensor | None = None,
        future: Future | None = None,
    ) -> None:
        refuse_unlike(policies)
        refuse_places(policies[0], layer)
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
        self._reader = Reader(policies, layer, rope)
        self._totals = Totals(self._needs.accumulated, layer)
        self.evicted_at_NLGK = torch.zeros(
            (1, len(layers), layer.num_kv_heads, 0), dtype=torch.int32
        )
        self.num_decisions = 0
        self._clipped: list[torch.Tensor] = []
        self._clamped: list[torch.Tensor] = []

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
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as attention reads them, evicted ones included, [L, G, K, D]."""
        return self._reader.storage.key_LGKD, self._reader.storage.value_LGKD

    @property
    def closed_LGK(self) -> torch.Tensor:
        """Keys that are stored transformed, bool; all False without a transform."""
        return self._reader.storage.closed_LGK

    @property
    def num_sets(self) -> int:
        """N."""
        return self._num_sets

    @property
    def is_clipped_NL(self) -> torch.Tensor:
        """Whether a budget was smaller than what was to be protected, on the CPU."""
        return self._any_NL(self._clipped)

    @property
    def is_clamped_NL(self) -> torch.Tensor:
        """Whether a budget was larger than what the full cache held, on the CPU."""
        return self._any_NL(self._clamped)

    @property
    def room(self) -> int:
        """Rows that may be read before entries close; a read of more is refused."""
        return self._reader.storage.room(self.held_NLGK)

    def absorb(
        self,
        query_LHQD: torch.Tensor,
        key_LGQD: torch.Tensor,
        value_LGQD: torch.Tensor,
        accumulated: Mapping[Accumulator, torch.Tensor] | None = None,
    ) -> None:
        """Take rows whose outputs nobody needs, or somebody has computed: see ``sweep``.

        Parameters
        ----------
        query_LHQD, key_LGQD, value_LGQD
            Post-RoPE queries, keys and values of the next Q positions.
        accumulated
            What the accumulators have after these rows, if somebody has computed it already.
        """
        self._append(query_LHQD, key_LGQD, value_LGQD)
        if accumulated is not None:
            self._totals.replace(accumulated)
        elif not self._totals.is_empty:
            for _ in self._attended(query_LHQD.shape[-2]):
                pass  # the weights themselves are of no use, what they add up to is taken

    def accumulated(self) -> dict[Accumulator, torch.Tensor]:
        """Return what the accumulators have so far, [N, L, H or G, K]."""
        return self._totals.states

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
        storage = self._reader.storage
        for outcome in self._attended(query_LHQD.shape[-2]):
            value_LGKD = storage.value_LGKD[..., : outcome.rows.stop, :]
            yield seen_outputs(outcome.weights_LGNMQK, value_LGKD), outcome
        if self.num_decisions:
            storage.close(self.held_NLGK)

    def run(
        self, query_LHQD: torch.Tensor, key_LGQD: torch.Tensor, value_LGQD: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Outcome]]:
        """Take any number of rows like ``read``, as many at a time as there is room for."""
        start, num_rows = 0, query_LHQD.shape[-2]
        while start < num_rows:
            stop = min(num_rows, start + self.room) if self.num_decisions else num_rows
            rows = (one[..., start:stop, :] for one in (query_LHQD, key_LGQD, value_LGQD))
            yield from self.read(*rows)
            start = stop

    def attend(
        self, query_LHQD: torch.Tensor, key_LGQD: torch.Tensor, value_LGQD: torch.Tensor
    ) -> torch.Tensor:
        """Take rows and return their attention outputs alone, [L, H, Q, D], of one plain policy.

        The same as ``read`` gives, but what is not held is not touched.

        Parameters
        ----------
        query_LHQD, key_LGQD, value_LGQD
            Post-RoPE queries, keys and values of the next Q positions.
        """
        self._append(query_LHQD, key_LGQD, value_LGQD)
        first_row = self.num_tokens - query_LHQD.shape[-2]
        held_LGK = self.evicted_at_NLGK[0] == NEVER
        if self.layer.window is not None:
            held_LGK[..., : max(0, first_row + 1 - self.layer.window)] = False
        storage = self._reader.storage
        entries = gathered(storage.key_LGKD, storage.value_LGKD, held_LGK, query_LHQD.shape[1:3])
        parts = []
        for start, weights_LGMQC in gathered_rows(
            as_wide(query_LHQD), entries, first_row, self.layer
        ):
            output_LGXD = weights_LGMQC.flatten(2, 3) @ entries.value_LGCD
            parts.append(output_LGXD.unflatten(2, weights_LGMQC.shape[2:4]).flatten(1, 2))
            self._totals.add_gathered(weights_LGMQC, entries.position_LGC, first_row + start)
        return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]

    def score(self) -> torch.Tensor:
        """Return the scores of all keys as they are now, [N, L, G, K]; axes may be 1.

        They depend on nothing but the scorer and what was read, so that policies that differ in the
        rest may share them.
        """
        return self.policy.scorer.score(self.view(self._needs))

    def decide(self, score_NLGK: torch.Tensor | None = None) -> None:
        """Evict down to the budget of the tokens seen.

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
        device, held_NLGK = self.evicted_at_NLGK.device, self.held_NLGK
        score_NLGK = self.score() if score_NLGK is None else score_NLGK
        refuse_nan(score_NLGK, held_NLGK, self._layers, self.policy)
        held_NLGK = held_NLGK.expand(self._num_sets, -1, -1, -1)
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
        self.evicted_at_NLGK = self.evicted_at_NLGK.where(~evicted_NLGK, self.num_tokens)
        self._totals.spread(self._num_sets)
        self._clipped.append(clipped_NLG)
        self._clamped.append(budget_NLG > self.layer.entries(self.num_tokens))
        self._settle()

    def _settle(self) -> None:
        """Let what stores and chooses entries take notice of a decision."""
        self.num_decisions += 1
        if self.policy.is_plain:
            return
        storage, chooser = self._reader.storage, self._reader.chooser
        if self.num_decisions == 1:
            storage.fit(self.view(storage.needs))
            chooser.fit(self.view(chooser.needs))
        chooser.decided()
        storage.turn(self.evicted_at_NLGK != NEVER)
        storage.close(self.held_NLGK)

    def view(self, needs: Needs) -> View:
        """Return the state as a rule that declared ``needs`` may see it, and nothing else."""
        last, query_LHTD = needs.last_queries, self._reader.query_LHTD
        storage = self._reader.storage
        return View(
            layer=self.layer,
            layers=self._layers,
            seed=self._seed,
            held_NLGK=self.held_NLGK,
            num_decisions=self.num_decisions,
            stored=storage.key_LGKD,
            keys=storage.unturned_key_LGKD if needs.keys else None,
            values=storage.value_LGKD if needs.values else None,
            queries=query_LHTD if needs.queries else None,
            last_queries=query_LHTD[..., -last:, :] if last else None,
            accumulated=self._totals.states,
            rope=self._rope,
            future=None if self._future is None else self._future.declared(needs),
        )

    def _append(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        num_new = key.shape[-2]
        if self.num_decisions and num_new > self.room:
            msg = f"{num_new} rows are more than the {self.room} before entries close."
            raise UsageError(msg)
        self._reader.append(query, key, value)
        self.evicted_at_NLGK = pad(self.evicted_at_NLGK.to(key.device), (0, num_new), value=NEVER)
        self._totals.grow(num_new, self._reader.storage.key_LGKD, len(self.evicted_at_NLGK))

    def _attended(self, num_rows: int) -> Iterator[Outcome]:
        """Yield the attention of the newest rows, block by block; what they add up to is taken."""
        stays_NLGK = self.evicted_at_NLGK == NEVER
        for outcome in self._reader.read(num_rows, stays_NLGK, chooses=bool(self.num_decisions)):
            self._totals.add(outcome)
            yield outcome

    def _any_NL(self, flags_NLG: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return whether anything was so at any decision, bool on the CPU."""
        none_NL = torch.zeros((self._num_sets, len(self._layers)), dtype=torch.bool)
        return torch.stack(list(flags_NLG)).any(-1).any(0).cpu() if flags_NLG else none_NL

    def _template_K(self) -> torch.Tensor:
        """Return which of the tokens seen are of the chat template."""
        device = self.evicted_at_NLGK.device
        if self._template_T is None:
            return torch.zeros(self.num_tokens, dtype=torch.bool, device=device)
        return self._template_T[: self.num_tokens].to(device)
