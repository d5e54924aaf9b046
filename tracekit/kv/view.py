"""What a scorer sees at a decision: rows up to now, and only what it declared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.nn.functional import pad

from tracekit.errors import UsageError
from tracekit.kv.attend import row_blocks, seen_weights, to_heads
from tracekit.measure.attention import logits_HQK, visible_QK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracekit.kv.accumulate import Accumulator
    from tracekit.kv.scorer import Needs
    from tracekit.spec import LayerSpec, RopeSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """The state of a stack of layers at a decision. N is 1 until the first decision was made.

    Parameters
    ----------
    layer
        The spec that the layers share, its index aside.
    layers
        Their L numbers.
    seed
        Of the sequence.
    held_NLGK
        bool: keys that are there, neither evicted nor out of the window. K tokens were seen.
    num_decisions
        Decisions made before this one.
    stored
        All keys, [L, G, K, D].
    rope
        Rotary embedding of the layers; None if they have none.
    keys, values, queries, last_queries, accumulated, future
        What is behind the properties; None or missing if not declared.
    """

    layer: LayerSpec
    layers: tuple[int, ...]
    seed: int
    held_NLGK: torch.Tensor
    num_decisions: int = 0
    stored: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    last_queries: torch.Tensor | None = None
    accumulated: Mapping[Accumulator, torch.Tensor] | None = None
    rope: RopeSpec | None = None
    future: Future | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens seen, K."""
        return self.held_NLGK.shape[-1]

    @property
    def position_K(self) -> torch.Tensor:
        """Positions of the keys, int64."""
        return torch.arange(self.num_tokens, device=self.held_NLGK.device)

    @property
    def key_LGKD(self) -> torch.Tensor:
        """Keys as they were written, evicted ones included."""
        return _declared(self.keys, "keys")

    @property
    def value_LGKD(self) -> torch.Tensor:
        """Values, evicted ones included."""
        return _declared(self.values, "values")

    @property
    def query_LHKD(self) -> torch.Tensor:
        """Queries of all rows so far, one a key."""
        return _declared(self.queries, "queries")

    @property
    def last_query_LHQD(self) -> torch.Tensor:
        """Queries of the newest rows (fewer at the start)."""
        return _declared(self.last_queries, "last_queries")

    @property
    def later(self) -> Future:
        """Rows after the decision."""
        return _declared(self.future, "future")

    def total_NLXK(self, accumulator: Accumulator) -> torch.Tensor:
        """Return what has been accumulated over all rows so far, [N, L, H or G, K]."""
        return _declared((self.accumulated or {}).get(accumulator), f"accumulated {accumulator}")

    @property
    def last_attention_NLHQK(self) -> torch.Tensor:
        """Attention of the newest rows, renormalised over the held keys."""
        return to_heads(seen_weights(self.last_logits_LHQK, self.last_seen_NLGQK, self.layer))

    @property
    def last_seen_NLGQK(self) -> torch.Tensor:
        """bool: which of the keys held now each of the newest rows sees."""
        return self.held_NLGK[..., None, :] & self._last_seen_QK()

    @property
    def last_logits_LHQK(self) -> torch.Tensor:
        """Logits of the newest rows; -inf for keys that a row does not see (evicted ones: any)."""
        query_LHQD = self.last_query_LHQD
        logits_LHQK = logits_HQK(query_LHQD, _declared(self.stored, "last_queries"), self.layer)
        return logits_LHQK.masked_fill_(~self._last_seen_QK(), -torch.inf)

    def _last_seen_QK(self) -> torch.Tensor:
        num_rows, num_keys = self.last_query_LHQD.shape[-2], self.num_tokens
        first, device = num_keys - num_rows, self.held_NLGK.device
        return visible_QK(self.layer, num_rows, num_keys, first_query=first, device=device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Future:
    """Rows after a decision, for bounds that no decoder can reach.

    Parameters
    ----------
    layer
        The spec that the layers share.
    query_LHTD, key_LGTD, value_LGTD
        All recorded rows of the sequence.
    influence_LPHRD
        Gradients of P probes at the attention outputs of the rows from ``influence_from`` on; P = 0
        without probes, or to a rule that does not declare them.
    influence_from
        The first row that has gradients.
    """

    layer: LayerSpec
    query_LHTD: torch.Tensor
    key_LGTD: torch.Tensor
    value_LGTD: torch.Tensor
    influence_LPHRD: torch.Tensor
    influence_from: int

    @property
    def num_rows(self) -> int:
        """T, all rows of the sequence."""
        return self.key_LGTD.shape[-2]

    @property
    def num_probes(self) -> int:
        """P."""
        return self.influence_LPHRD.shape[1]

    def declared(self, needs: Needs) -> Future | None:
        """Return what a rule that declared ``needs`` may see of it."""
        if not needs.future:
            return None
        if needs.influence:
            return self
        return replace(self, influence_LPHRD=self.influence_LPHRD[:, :0])

    def require_influence(self, row: int) -> None:
        """Raise if rows from ``row`` on have no gradients.

        Raises
        ------
        UsageError
            If there are no probes, or they begin later.
        """
        if not self.num_probes:
            msg = (
                "it scores keys by influence probes, and there are none (or it does not declare "
                "them): record with --capture influence."
            )
            raise UsageError(msg)
        if why := begins_late(row, self.influence_from):
            msg = f"it scores keys by influence probes; {why}"
            raise UsageError(msg)

    def influence(self, start: int, end: int) -> torch.Tensor:
        """Return gradients [L, P, H, Q, D] of rows ``start`` .. ``end`` - 1, 0 where there are none."""
        first, last = (max(0, row - self.influence_from) for row in (start, end))
        taken_LPHQD = self.influence_LPHRD[..., first:last, :]
        missing = end - start - (last - first)
        return pad(taken_LPHQD, (0, 0, missing, 0)) if missing else taken_LPHQD

    def by_layer(self) -> Iterator[Future]:
        """Yield the rows of one layer after another, in float64."""
        names = ("query_LHTD", "key_LGTD", "value_LGTD", "influence_LPHRD")
        for at in range(len(self.key_LGTD)):
            tensors = {name: getattr(self, name)[at : at + 1].double() for name in names}
            yield replace(self, **tensors)

    def weights(
        self, held_NLGK: torch.Tensor, rows: range | None = None, *, width: int = 1
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield attention of the later rows over what is held now and what comes after.

        Rows are renormalised over the held keys, as they would be if nothing more were evicted.

        Parameters
        ----------
        held_NLGK
            bool, K tokens seen.
        rows
            Some of the later rows; None: all of them.
        width
            Numbers that are made of each weight, for the size of the blocks.

        Yields
        ------
        tuple
            Position of the first row of a block, and weights [L, G, N, M, Q, its last row + 1].
        """
        num_tokens, num_rows = held_NLGK.shape[-1], self.num_rows
        rows = range(num_tokens, num_rows) if rows is None else rows
        num_layers, num_heads = self.query_LHTD.shape[:2]
        item = self.key_LGTD.element_size() * width
        row_bytes = len(held_NLGK) * num_layers * num_heads * num_rows * item
        for start, end in row_blocks(rows.start, rows.stop, row_bytes):
            here_NLGK = pad(held_NLGK, (0, end - num_tokens), value=True)
            seen_QK = visible_QK(
                self.layer, end - start, end, first_query=start, device=held_NLGK.device
            )
            logits_LHQK = logits_HQK(
                self.query_LHTD[..., start:end, :], self.key_LGTD[..., :end, :], self.layer
            )
            yield start, seen_weights(logits_LHQK, here_NLGK[..., None, :] & seen_QK, self.layer)


def begins_late(row: int, influence_from: int) -> str:
    """Return why gradients from a row on do not serve an eviction at ``row``; '' if they do."""
    if influence_from <= row:
        return ""
    return (
        f"probes begin at row {influence_from} and it evicts at {row}: record with --probe-from "
        f"{row} or earlier."
    )


def _declared(value: T | None, name: str) -> T:
    if value is None:
        msg = f"a scorer reads {name} without declaring it: add {name} to its needs."
        raise UsageError(msg)
    return value
