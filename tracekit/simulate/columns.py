"""From what a family did to a stack of layers, row by row, to columns of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.simulate.steps import Steps, step_buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Replay
    from tracekit.spec import LayerSpec

Columns = dict[str, np.ndarray]
"""Values by column, all of one shape."""


class Stack:
    """A stack of layers under the N policies of one family: columns [N, L, G + 1] by steps.

    The last head is all of the layer together.

    Parameters
    ----------
    policies
        N policies, which differ in their amount alone.
    layers
        Specs of the L layers.
    result
        The replay, from the first row that counts on.
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
        result: Replay,
        *,
        point: int,
        needle_T: np.ndarray,
        bytes_per_number: int,
    ) -> None:
        self.result, self._policy, self._layer = result, policies[0], layers[0]
        self._point, self._needle_T = point, needle_T
        heads = [*range(layers[0].num_kv_heads), schema.ALL]
        self.index = np.array([(one.index, head) for one in layers for head in heads])
        self._bytes = self._all_bytes(bytes_per_number)
        self.rows = {name: array.sum((1, 2)) for name, array in self._bytes.items()}
        self.steps = step_buckets(result.first_row - point, len(result.full_R))
        self.columns = [self._columns(steps) for steps in self.steps]

    def _all_bytes(self, bytes_per_number: int) -> dict[str, np.ndarray]:
        """Return bytes held, read, fetched ... of each head at each row, [N, L, G, R]."""
        policy, layer, found = self._policy, self._layer, self.result.measures
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
            "full": np.broadcast_to(size * self.result.full_R.astype(np.float64), held.shape),
            "padded": np.broadcast_to(total.max(2, keepdims=True), held.shape),
            "read": read,
            "fetched": total / held * found.fetched_NLGR,
            "state": state * held,
        }

    def _columns(self, steps: Steps) -> Columns:
        """Return all columns over some rows."""
        found = self.result.measures
        columns = shares(
            {name: _with_all(array[..., steps.rows], np.sum) for name, array in self._bytes.items()}
        )
        error, norm = (
            self._by_group(one)[..., steps.rows].sum((-2, -1))
            for one in (found.error_sq_NLHR, found.norm_sq_LHR[None])
        )
        columns["output_error"] = _relative(_with_all(error, np.sum), _with_all(norm, np.sum))
        columns["projected_error"] = self._projected(steps)
        columns["hit_frac"] = self._hits(steps)
        means = {
            "output_cosine": found.cosine_NLHR,
            "mass_kept": found.mass_kept_NLHR,
            "attention_kl_nats": found.row_kl_NLHR,
        }
        for name, array in means.items():
            mean = self._by_group(array)[..., steps.rows].mean((-2, -1))
            columns[name] = _with_all(mean, np.mean)
        columns["topk_overlap"] = _with_all(mean_of(found.overlap_NLGR[..., steps.rows]), np.mean)
        return columns | self._history(steps)

    def _history(self, steps: Steps) -> Columns:
        """Return columns about which entries left and when."""
        first = self.result.first_row
        end, start = first + steps.end, first + steps.start
        evicted_at = self.result.evicted_at_NLGT[..., :end]
        gone = evicted_at < end
        num = _with_all(gone.sum(-1), np.sum)
        age = np.where(gone, evicted_at - np.arange(end, dtype=np.int32), 0)
        total_age = _with_all(age.sum(-1), np.sum)
        later = gone & (evicted_at > max(self._point, start - 1))
        erased = np.concatenate([gone.mean(-1), gone.all(2, keepdims=True).mean(-1)], axis=2)
        overlap = _with_all(self.result.oracle_overlap_NLG, np.mean)
        return {
            "num_evicted": num,
            "evicted_age_tokens": np.where(num > 0, total_age / np.maximum(num, 1), np.nan),
            "churn": _with_all(later.sum(-1) / (end - start), np.mean),
            "erased_frac": erased,
            "needle_kept": self._needle(start, end, num.shape),
            "oracle_overlap": overlap if steps.name == schema.ANY else np.full(num.shape, np.nan),
        }

    def _needle(self, start: int, end: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the part of needle entries that is held, mean over rows; null without a needle."""
        if not len(self._needle_T):
            return np.full(shape, np.nan)
        # Rows before the one that a decision is named by still read what it evicts.
        until = self.result.evicted_at_NLGT[..., self._needle_T].astype(np.int64)
        if self._layer.window is not None:
            until = np.minimum(until, self._needle_T + self._layer.window)
        num_rows = np.clip(until, start, end) - start
        return _with_all(num_rows.mean(-1) / (end - start), np.mean)

    def _hits(self, steps: Steps) -> np.ndarray:
        """Return the part of what rows read that the fast tier held; null without one."""
        found = self.result.measures
        read, fetched = (
            _with_all(one[..., steps.rows].sum(-1), np.sum)
            for one in (found.read_NLGR, found.fetched_NLGR)
        )
        return 1 - fetched / read if self._policy.tier is not None else np.full(read.shape, np.nan)

    def _projected(self, steps: Steps) -> np.ndarray:
        """Return the relative error after the output projection; a head's beside the layer's size."""
        found = self.result.measures
        error = found.projected_sq_NLXR[..., steps.rows].sum(-1)
        norm = found.projected_norm_sq_LXR[..., steps.rows].sum(-1)[None]
        if not error.shape[2]:
            return np.full((*error.shape[:2], self._layer.num_kv_heads + 1), np.nan)
        return _relative(error, norm)

    def _by_group(self, values_NLHR: np.ndarray) -> np.ndarray:
        """Return query-head values as [N, L, G, M, R], in float64."""
        shape = (*values_NLHR.shape[:2], self._layer.num_kv_heads, self._layer.group_size, -1)
        return np.asarray(values_NLHR, dtype=np.float64).reshape(shape)


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


def _with_all(array: np.ndarray, join: Any) -> np.ndarray:
    """Return [N, L, G + 1, ...]: heads, then what ``join`` makes of them."""
    return np.concatenate([array, join(array, axis=2, keepdims=True)], axis=2)


def _relative(error_sq: np.ndarray, norm_sq: np.ndarray) -> np.ndarray:
    """Return sqrt(error / norm); where the full output is zero: 0 without an error, else null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.sqrt(error_sq / norm_sq)
    return np.where(norm_sq > 0, relative, np.where(error_sq > 0, np.nan, 0.0))


def mean_of(array: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis of what is a number; NaN where nothing is."""
    there = ~np.isnan(array)
    count = there.sum(-1)
    total = np.where(there, array, 0).sum(-1)
    return np.where(count > 0, total / np.where(count, count, 1), np.nan)
