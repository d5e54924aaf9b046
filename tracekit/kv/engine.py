"""The state machine of a stack of layers: rows are read, entries leave, nothing comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.errors import InputError, UsageError
from tracekit.kv.attend import row_blocks, seen_outputs, seen_weights, to_heads
from tracekit.kv.rows import Rows
from tracekit.kv.select import select
from tracekit.kv.view import View
from tracekit.measure.attention import as_wide, logits_HQK, visible_QK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.spec import LayerSpec

NEVER = torch.iinfo(torch.int32).max
"""In ``evicted_at``: still there."""


class Engine:
    """Layers of one shape under N policies that differ in the kept amount alone.

    Call ``absorb`` with the rows before the first decision, ``decide``, ``read`` the next rows,
    ``decide`` again where the schedule says so, and so on.

    Parameters
    ----------
    layer
        The spec that the layers share, its index aside.
    layers
        Their L numbers.
    policies
        N policies.
    seed
        Of the sequence, for rules that draw.

    Raises
    ------
    UsageError
        If the policies differ in more than the kept amount, or one has none.
    """

    def __init__(
        self, layer: LayerSpec, layers: Sequence[int], policies: Sequence[Policy], seed: int
    ) -> None:
        self._kept = [policy.kept for policy in policies if policy.kept is not None]
        if len({policy.family for policy in policies}) != 1 or len(self._kept) != len(policies):
            msg = "policies that are replayed together have one family and a kept amount each."
            raise UsageError(msg)
        self._policy = policies[0]
        self._needs = self._policy.scorer.needs
        self.layer = layer
        self._layers = tuple(layers)
        self._seed = seed
        self._key, self._value = Rows(), Rows()
        self._last_query: torch.Tensor | None = None
        num = (1, len(layers), layer.num_kv_heads, 0)
        self.evicted_at_NLGK = torch.zeros(num, dtype=torch.int32)
        self._attention_sum_NLGK = torch.zeros(num)
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

    def absorb(
        self, query_LHQD: torch.Tensor, key_LGQD: torch.Tensor, value_LGQD: torch.Tensor
    ) -> None:
        """Take rows whose outputs nobody needs: those before the first decision.

        Parameters
        ----------
        query_LHQD, key_LGQD, value_LGQD
            Post-RoPE queries, keys and values of the next Q positions.
        """
        self._append(query_LHQD, key_LGQD, value_LGQD)
        if self._needs.attention_sum is not None:
            for _ in self._weights(query_LHQD):
                pass  # the weights themselves are of no use, their sums are taken

    def read(
        self, query_LHQD: torch.Tensor, key_LGQD: torch.Tensor, value_LGQD: torch.Tensor
    ) -> torch.Tensor:
        """Take rows and return their attention outputs over what is held, causal inside the block.

        Parameters
        ----------
        query_LHQD, key_LGQD, value_LGQD
            Post-RoPE queries, keys and values of the next Q positions.

        Returns
        -------
        Tensor
            [N, L, H, Q, D], float32 or float64.
        """
        self._append(query_LHQD, key_LGQD, value_LGQD)
        outputs = [
            seen_outputs(weights, self._value.all[..., :end, :])
            for end, weights in self._weights(query_LHQD)
        ]
        return torch.cat(outputs, dim=-2)

    def decide(self) -> torch.Tensor:
        """Evict down to the budget of the tokens seen, and return how many left: int64 [N, L, G].

        Raises
        ------
        InputError
            If a score of a held key is not a number.
        """
        held_NLGK, scorer = self.held_NLGK, self._policy.scorer
        score_NLGK = scorer.score(self._view(held_NLGK))
        self._check(score_NLGK, held_NLGK)
        num_sets = len(self._kept)
        held_NLGK = held_NLGK.expand(num_sets, -1, -1, -1)
        budget_NLG = self._policy.budget.entries(
            self._kept, self.num_tokens, len(self._layers), self.layer.num_kv_heads
        ).to(held_NLGK.device)
        kept_NLGK, clipped_NLG = select(score_NLGK, held_NLGK, budget_NLG, self._policy.protection)
        evicted_NLGK = held_NLGK & ~kept_NLGK
        self.evicted_at_NLGK = torch.where(evicted_NLGK, self.num_tokens, self.evicted_at_NLGK)
        self._attention_sum_NLGK = self._attention_sum_NLGK.expand(num_sets, -1, -1, -1)
        self.is_clipped_N |= clipped_NLG.flatten(1).any(1).cpu()
        over_NLG = budget_NLG > self.layer.entries(self.num_tokens)
        self.is_clamped_N |= over_NLG.flatten(1).any(1).cpu()
        return evicted_NLGK.sum(-1)

    def _append(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        num_new = key.shape[-2]
        self._key.append(as_wide(key))
        self._value.append(as_wide(value))
        self.evicted_at_NLGK = pad(self.evicted_at_NLGK.to(key.device), (0, num_new), value=NEVER)
        if self._needs.attention_sum is not None:
            sum_NLGK = self._attention_sum_NLGK.to(self._key.all)
            self._attention_sum_NLGK = pad(sum_NLGK, (0, num_new))
        if self._needs.last_queries:
            before = [] if self._last_query is None else [self._last_query]
            rows = torch.cat([*before, as_wide(query)], dim=-2)
            self._last_query = rows[..., -self._needs.last_queries :, :]

    def _weights(self, query_LHQD: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the attention weights of the newest rows, block by block; sum them if asked to.

        Yields
        ------
        tuple
            End of the block, which is also its number of keys, and weights [L, G, N, M, Q, K].
        """
        num_rows, last = query_LHQD.shape[-2], self.num_tokens
        num_sets, item = self.evicted_at_NLGK.shape[0], self._key.all.element_size()
        row_bytes = num_sets * item * last * query_LHQD.shape[:2].numel()
        for start, end in row_blocks(last - num_rows, last, row_bytes):
            rows = slice(start - last + num_rows, end - last + num_rows)
            here_NLGK = self.evicted_at_NLGK[..., :end] == NEVER
            weights = self._attend(query_LHQD[..., rows, :], here_NLGK)
            if self._needs.attention_sum is not None:
                sum_LGNK = _REDUCE[self._needs.attention_sum](weights)
                self._attention_sum_NLGK[..., :end] += sum_LGNK.permute(2, 0, 1, 3)
            yield end, weights

    def _attend(self, query_LHQD: torch.Tensor, held_NLGK: torch.Tensor) -> torch.Tensor:
        """Return the weights of the last rows before the end of ``held``: [L, G, N, M, Q, K]."""
        num_rows, num_keys = query_LHQD.shape[-2], held_NLGK.shape[-1]
        first, device = num_keys - num_rows, held_NLGK.device
        seen_QK = visible_QK(self.layer, num_rows, num_keys, first_query=first, device=device)
        logits_LHQK = logits_HQK(query_LHQD, self._key.all[..., :num_keys, :], self.layer)
        return seen_weights(logits_LHQK, held_NLGK[..., None, :] & seen_QK, self.layer)

    def _view(self, held_NLGK: torch.Tensor) -> View:
        """Return what the scorer declared, and nothing else."""
        needs, query = self._needs, self._last_query
        return View(
            layer=self.layer,
            layers=self._layers,
            seed=self._seed,
            held_NLGK=held_NLGK,
            keys=self._key.all if needs.keys else None,
            attention_sum=self._attention_sum_NLGK if needs.attention_sum is not None else None,
            last_attention=None
            if query is None
            else lambda: to_heads(self._attend(query, held_NLGK)),
        )

    def _check(self, score_NLGK: torch.Tensor, held_NLGK: torch.Tensor) -> None:
        """Raise if a held key has no number for a score."""
        bad_NLGK = score_NLGK.isnan() & held_NLGK
        if bad_NLGK.any():
            _, layer, head, position = bad_NLGK.nonzero()[0].tolist()
            msg = (
                f"policy {self._policy.family!r} has no score for position {position} in layer "
                f"{self._layers[layer]}, KV head {head}, after {self.num_tokens} tokens (NaN): the "
                "queries, keys or values recorded there are not finite, so leave that layer out."
            )
            raise InputError(msg)


_REDUCE = {
    "mean": lambda weights: weights.mean(3).sum(3),
    "sum": lambda weights: weights.sum((3, 4)),
    "max": lambda weights: weights.amax(3).sum(3),
}
"""From weights [L, G, N, M, Q, K] to what each key received, [L, G, N, K]."""
