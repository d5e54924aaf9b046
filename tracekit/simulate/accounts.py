"""What a family held, read and lost, row by row, as columns of results: the same at all levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tracekit import schema
from tracekit.simulate.steps import Steps, step_buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.entries import Entries
    from tracekit.kv.policy import Policy
    from tracekit.spec import LayerSpec

Columns = dict[str, np.ndarray]
"""Values by column, all of one shape."""


class Held(Protocol):
    """What N policies held of the T rows of L layers; R of the rows are scored."""

    @property
    def first_row(self) -> int:
        """Position of the first scored row."""

    @property
    def full_R(self) -> np.ndarray:
        """Entries that the full cache holds at each scored row."""

    @property
    def entries(self) -> Entries[np.ndarray]:
        """Entries held, read, fetched and stored transformed at each scored row."""

    @property
    def evicted_at_NLGT(self) -> np.ndarray:
        """Tokens seen when the entry of a position was evicted; ``engine.NEVER`` if it stayed."""

    @property
    def is_clipped_N(self) -> np.ndarray:
        """Whether a budget was somewhere smaller than what was to be protected."""

    @property
    def is_clamped_N(self) -> np.ndarray:
        """Whether a budget was somewhere larger than what the full cache held."""


class Accounts:
    """A stack of layers under the N policies of one family: columns [N, L, G + 1] by steps.

    The last head is all of the layer together.

    Parameters
    ----------
    policies
        N policies, which differ in their amount alone.
    layers
        Specs of the L layers.
    result
        What was held, from the first row that counts on.
    point
        The eviction point.
    needle_T
        Positions of the needle in the prompt; empty if there is none.
    bytes_per_number
        For the accounting.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        layers: Sequence[LayerSpec],
        result: Held,
        *,
        point: int,
        needle_T: np.ndarray,
        bytes_per_number: int,
    ) -> None:
        self._held, self._policy, self._layer = result, policies[0], layers[0]
        self._point, self._needle_T = point, needle_T
        heads = [*range(layers[0].num_kv_heads), schema.ALL]
        self.index = np.array([(one.index, head) for one in layers for head in heads])
        self._bytes = self._all_bytes(bytes_per_number)
        self.rows = {name: array.sum((1, 2)) for name, array in self._bytes.items()}
        self.steps = step_buckets(self.steps_before, len(result.full_R))
        self.columns = [self._columns(steps) for steps in self.steps]

    @property
    def held(self) -> Held:
        """What was held."""
        return self._held

    @property
    def layer(self) -> LayerSpec:
        """Spec of the first layer; the others of the stack are like it."""
        return self._layer

    @property
    def point(self) -> int:
        """The eviction point: tokens seen at the first decision that scored rows follow."""
        return self._point

    @property
    def steps_before(self) -> int:
        """Steps between the eviction point and the first row that counts."""
        return self._held.first_row - self._point

    def _all_bytes(self, bytes_per_number: int) -> dict[str, np.ndarray]:
        """Return bytes held, read, fetched ... of each head at each row, [N, L, G, R]."""
        policy, layer, found = self._policy, self._layer, self._held.entries
        size = bytes_per_number * (layer.head_dim + layer.value_dim)
        held = found.held_NLGR.astype(np.float64)
        total = size * held
        if policy.transform is not None:
            less = size - policy.transform.entry_bytes(layer, bytes_per_number)
            fixed = policy.transform.fixed_bytes(layer, bytes_per_number)
            total = total - less * found.closed_NLGR + fixed
        read = total / held * found.read_NLGR
        state = float(policy.scorer.state_bytes(layer.group_size))
        if policy.selector is not None:
            read = read + policy.selector.index_bytes(layer, bytes_per_number) * held
            state += policy.selector.state_bytes(layer, bytes_per_number)
        return {
            "held": total,
            "full": np.broadcast_to(size * self._held.full_R.astype(np.float64), held.shape),
            "padded": np.broadcast_to(total.max(2, keepdims=True), held.shape),
            "read": read,
            "fetched": total / held * found.fetched_NLGR,
            "state": state * held,
        }

    def _columns(self, steps: Steps) -> Columns:
        """Return all columns over some rows."""
        columns = shares(
            {name: with_all(array[..., steps.rows], np.sum) for name, array in self._bytes.items()}
        )
        columns["hit_frac"] = self._hits(steps)
        return columns | self._history(steps)

    def _history(self, steps: Steps) -> Columns:
        """Return columns about which entries left and when."""
        first = self._held.first_row
        end, start = first + steps.end, first + steps.start
        evicted_at = self._held.evicted_at_NLGT[..., :end]
        gone = evicted_at < end
        num = with_all(gone.sum(-1), np.sum)
        age = np.where(gone, evicted_at - np.arange(end, dtype=np.int32), 0)
        total_age = with_all(age.sum(-1), np.sum)
        later = gone & (evicted_at > max(self._point, start - 1))
        erased = np.concatenate([gone.mean(-1), gone.all(2, keepdims=True).mean(-1)], axis=2)
        return {
            "num_evicted": num,
            "evicted_age_tokens": np.where(num > 0, total_age / np.maximum(num, 1), np.nan),
            "churn": with_all(later.sum(-1) / (end - start), np.mean),
            "erased_frac": erased,
            "needle_kept": self._needle(start, end, num.shape),
        }

    def _needle(self, start: int, end: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the part of needle entries that is held, mean over rows; null without a needle."""
        if not len(self._needle_T):
            return np.full(shape, np.nan)
        # Rows before the one that a decision is named by still read what it evicts.
        until = self._held.evicted_at_NLGT[..., self._needle_T].astype(np.int64)
        if self._layer.window is not None:
            until = np.minimum(until, self._needle_T + self._layer.window)
        num_rows = np.clip(until, start, end) - start
        return with_all(num_rows.mean(-1) / (end - start), np.mean)

    def _hits(self, steps: Steps) -> np.ndarray:
        """Return the part of what rows read that the fast tier held; null without one."""
        found = self._held.entries
        read, fetched = (
            with_all(one[..., steps.rows].sum(-1), np.sum)
            for one in (found.read_NLGR, found.fetched_NLGR)
        )
        return 1 - fetched / read if self._policy.tier is not None else np.full(read.shape, np.nan)


def shares(bytes_by_name: dict[str, np.ndarray]) -> Columns:
    """Return the columns that follow from bytes held, padded, read and of the full cache.

    Parameters
    ----------
    bytes_by_name
        ``held``, ``padded``, ``read``, ``fetched``, ``state``, ``full``, rows last.
    """
    held, full = bytes_by_name["held"], bytes_by_name["full"]
    return {
        "kept_frac": (held / full).mean(-1),
        "kept_end_frac": held[..., -1] / full[..., -1],
        "peak_frac": held.max(-1) / full.max(-1),
        "padded_frac": (bytes_by_name["padded"] / full).mean(-1),
        "read_frac": (bytes_by_name["read"] / full).mean(-1),
        "kv_bytes": held.mean(-1),
        "peak_kv_bytes": held.max(-1),
        "full_kv_bytes": full.mean(-1),
        "read_bytes": bytes_by_name["read"].mean(-1),
        "fetched_bytes": bytes_by_name["fetched"].mean(-1),
        "state_bytes": bytes_by_name["state"].mean(-1),
    }


def with_all(array: np.ndarray, join: Any) -> np.ndarray:
    """Return [N, L, G + 1, ...]: heads, then what ``join`` makes of them."""
    return np.concatenate([array, join(array, axis=2, keepdims=True)], axis=2)


def mean_of(array: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis of what is a number; NaN where nothing is."""
    there = ~np.isnan(array)
    count = there.sum(-1)
    total = np.where(there, array, 0).sum(-1)
    return np.where(count > 0, total / np.where(count, count, 1), np.nan)
