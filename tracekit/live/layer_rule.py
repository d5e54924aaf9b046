"""What may be done to one layer of a model alone: rows drop entries, or a policy prunes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.errors import UsageError
from tracekit.kv.amounts import Frac
from tracekit.kv.anchors import Anchor, parse_anchor
from tracekit.kv.attend import row_blocks, seen_outputs, seen_weights
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.live.planned import planned
from tracekit.live.pruned import Pruned
from tracekit.measure.attention import logits_HQK, visible_QK, weights_HQK

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.kv.budget import Cache
    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Family, Setting
    from tracekit.kv.schedule import Spans
    from tracekit.live.run import FullRun


class Ruled(NamedTuple):
    """The rows of one layer from the first one that a rule may change.

    Parameters
    ----------
    output_HRD
        Attention outputs.
    left_GR
        Entries that each row had left, int64.
    evicted_at_GT
        Tokens seen when an entry left the cache, ``engine.NEVER`` if it stayed, int32.
    """

    output_HRD: torch.Tensor
    left_GR: torch.Tensor
    evicted_at_GT: torch.Tensor


class LayerRule(ABC):
    """What is done to one layer whose inputs are as recorded. The text is its identity."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What ``parse_rule`` reads back."""

    @property
    def content(self) -> str:
        """What the rule depends on beside its text: the hash of a file; empty for most."""
        return ""

    @abstractmethod
    def point(self, spans: Spans) -> int | None:
        """Return the position of the first row that the rule may change; None if there is none."""

    @abstractmethod
    def target_frac(self, spans: Spans, cache: Cache) -> float | None:
        """Return the fraction of the tokens seen that the rule is asked to keep, if it is one."""

    @abstractmethod
    def open(self, run: FullRun, setting: Setting, first_row: int) -> Callable[[int], Ruled]:
        """Return what gives the rows of a layer from ``point`` on, by the layer's number."""

    @abstractmethod
    def amounts(self, left_frac: float) -> dict[str, float]:
        """Return the result columns that say how much was left, of the mean fraction left."""

    @abstractmethod
    def is_idle(self, left_frac: float) -> bool:
        """Return whether the rule did nothing, of the mean fraction left."""


@dataclass(frozen=True)
class DroppedRows(LayerRule):
    """Each row drops the entries that it attends to least, and forgets this at once.

    The row sees n entries: floor(dropped * n) are dropped, at most n - 1, those of the lowest
    attention weight after softmax, meant over the query heads of a KV head; among equals the older.
    The row's own entry is never dropped. The rest is renormalised. No cache could do this: it is a
    disturbance of known size, the same in all layers, that shows which of them minds.

    Parameters
    ----------
    dropped
        Fraction of the entries seen.
    start
        Where the rows begin that are changed.
    """

    dropped: Frac
    start: Anchor

    @property
    def text(self) -> str:
        """``rows:0.03,at=prompt``."""
        return f"rows:{self.dropped.amount!r},at={self.start.text}"

    def point(self, spans: Spans) -> int | None:
        """Return where the rows begin, if one is left."""
        point = self.start.find(spans)
        return point if point is not None and 0 < point < spans.num_rows else None

    def target_frac(self, spans: Spans, cache: Cache) -> float | None:
        """Return None: nothing is evicted."""
        del spans, cache
        return None

    def open(self, run: FullRun, setting: Setting, first_row: int) -> Callable[[int], Ruled]:
        """Return what drops entries of each row."""
        del setting
        return partial(self._attend, run, first_row)

    def amounts(self, left_frac: float) -> dict[str, float]:
        """Return the fraction dropped: an axis of its own, not to be taken for eviction."""
        return {"dropped_entries_frac": 1 - left_frac}

    def is_idle(self, left_frac: float) -> bool:
        """Return whether rows were too short for the fraction to be one entry."""
        return left_frac == 1

    def kept(self, weights_GQK: torch.Tensor, seen_QK: torch.Tensor) -> torch.Tensor:
        """Return which entries rows keep, bool [G, Q, K].

        Parameters
        ----------
        weights_GQK
            Attention weights of the Q newest rows, meant over the query heads of a KV head.
        seen_QK
            bool, entries that a row sees.
        """
        num_rows, num_keys = seen_QK.shape
        is_own_QK = torch.ones_like(seen_QK).triu(num_keys - num_rows)
        may_go_QK = seen_QK & ~is_own_QK
        num_dropped = [min(self.dropped.of(n), n - 1) for n in seen_QK.sum(-1).tolist()]
        order = weights_GQK.where(may_go_QK, torch.inf).argsort(dim=-1, stable=True)
        place_K = torch.arange(num_keys, device=seen_QK.device).expand(order.shape)
        rank_GQK = torch.empty_like(order).scatter_(-1, order, place_K)
        return seen_QK & (rank_GQK >= rank_GQK.new_tensor(num_dropped)[:, None])

    def _attend(self, run: FullRun, first_row: int, number: int) -> Ruled:
        reference = run.references[number]
        layer, num_rows = reference.layer, reference.num_rows
        outputs, left = [], []
        row_bytes = layer.num_heads * num_rows * reference.key_LGTD.element_size()
        for start, end in row_blocks(first_row, num_rows, row_bytes):
            query, key, value = reference.rows(0, end)
            logits_1HQK = logits_HQK(query[:, :, start:], key, layer)
            seen_QK = visible_QK(layer, end - start, end, first_query=start, device=key.device)
            full_HQK = weights_HQK(logits_1HQK[0].masked_fill(~seen_QK, -torch.inf), layer)
            kept_GQK = self.kept(full_HQK.unflatten(0, (layer.num_kv_heads, -1)).mean(1), seen_QK)
            weights = seen_weights(logits_1HQK, kept_GQK[None, None], layer)
            outputs.append(seen_outputs(weights, value)[0, 0])
            left.append(kept_GQK.sum(-1))
        shape, device = reference.key_LGTD.shape[1:3], reference.key_LGTD.device
        stays_GT = torch.full(shape, NEVER, dtype=torch.int32, device=device)
        return Ruled(torch.cat(outputs, dim=1), torch.cat(left, dim=1), stays_GT)


@dataclass(frozen=True)
class PolicyRule(LayerRule):
    """A policy prunes one layer; its amount is said."""

    policy: Policy

    @property
    def text(self) -> str:
        """The policy's."""
        return self.policy.text

    @property
    def content(self) -> str:
        """That of its layer budget."""
        return self.policy.layers.content

    def point(self, spans: Spans) -> int | None:
        """Return the first decision, if a row follows it."""
        point = self.policy.schedule.point(spans)
        decided = () if point is None else self.policy.schedule.decisions(point, spans)
        return decided[0] if decided else None

    def target_frac(self, spans: Spans, cache: Cache) -> float | None:
        """Return the policy's."""
        return self.policy.target_frac(spans, cache)

    def open(self, run: FullRun, setting: Setting, first_row: int) -> Callable[[int], Ruled]:
        """Return what runs an engine for a layer; a layer budget is planned over all layers."""
        del first_row  # the family's own first decision
        return partial(self._attend, run, planned(run, [self.policy], setting), setting)

    def amounts(self, left_frac: float) -> dict[str, float]:
        """Return the fraction of entries held; nothing where they are not stored as they were."""
        return {} if self.policy.transform is not None else {"kept_frac": left_frac}

    def is_idle(self, left_frac: float) -> bool:
        """Return whether it should have evicted and evicted nothing."""
        return self.policy.evicts_only and left_frac == 1

    def _attend(self, run: FullRun, family: Family, setting: Setting, number: int) -> Ruled:
        pruned, reference = Pruned(run, family, setting), run.references[number]
        output_1HRD = pruned.attend(number, *reference.rows(pruned.first_row, run.num_rows))
        held_GR = pruned.entries[number].held_NLGR[0, 0]
        return Ruled(output_1HRD[0], held_GR, pruned.evicted_at[number][0])


def parse_rule(text: str) -> LayerRule:
    """Return the rule that a text names.

    Parameters
    ----------
    text
        ``rows:0.03``, or with ``,at=POINT`` where the rows begin (as in a policy, ``prompt`` if not
        said); anything else is a policy with its amount.

    Raises
    ------
    UsageError
        If it is neither, or a value is out of range.
    """
    name, _, rest = text.partition(":")
    if name != "rows":
        policy = parse(text)
        if policy.is_open:
            msg = f"rule {text!r} says no amount: write one, as in {policy.family}:kept=0.3."
            raise UsageError(msg)
        return PolicyRule(policy)
    amount, _, start = rest.partition(",")
    key, _, anchor = (start or "at=prompt").partition("=")
    try:
        dropped = float(amount)
    except ValueError:
        dropped = None
    if dropped is None or key != "at":
        msg = f"rule {text!r} drops no entries of rows: write one such as rows:0.03,at=prompt."
        raise UsageError(msg)
    return DroppedRows(Frac(dropped), parse_anchor(anchor))
