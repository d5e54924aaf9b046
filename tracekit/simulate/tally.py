"""From what a policy did, row by row, to its rows of results: heads, layers, all together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.kv.engine import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Replay
    from tracekit.spec import LayerSpec

STEP_ENDS = (16, 64, 256, 1024, 4096)
"""Last steps after the eviction point of the step buckets; the last bucket is open."""

Columns = dict[str, np.ndarray]
"""Values by column, all of one shape."""


@dataclass(frozen=True)
class Steps:
    """Some scored rows: the name of their bucket, the first of them and the last + 1."""

    name: str
    start: int
    end: int

    @property
    def rows(self) -> slice:
        """Of an axis of scored rows."""
        return slice(self.start, self.end)


def step_buckets(distance: int, num_rows: int) -> list[Steps]:
    """Return all scored rows, then those of each bucket of steps after the eviction point.

    Parameters
    ----------
    distance
        Steps between the eviction point and the first scored row.
    num_rows
        Scored rows.
    """
    buckets = [Steps(schema.ANY, 0, num_rows)]
    low = 0
    for high in (*STEP_ENDS, distance + num_rows):
        start, end = max(low - distance, 0), min(high - distance, num_rows)
        if start < end:
            name = f"{low + 1}-{high}" if high in STEP_ENDS else f">{low}"
            buckets.append(Steps(name, start, end))
        low = max(low, high)
    return buckets


class Tally:
    """What one policy did on one sequence, taken in layer stack by layer stack.

    Parameters
    ----------
    policy
        The policy.
    needle_T
        Positions of the needle in the prompt; empty if there is none.
    bytes_per_number
        For the accounting.
    """

    def __init__(self, policy: Policy, needle_T: np.ndarray, bytes_per_number: int) -> None:
        self._policy, self._needle_T = policy, needle_T
        self._bytes_per_number = bytes_per_number
        self._steps: list[Steps] = []
        self._index: list[np.ndarray] = []
        self._columns: list[list[Columns]] = []
        self._of_layers: list[list[Columns]] = []
        self._rows: dict[str, np.ndarray] = {}
        self._last_evicted_T = np.zeros(0)
        self._first_row = 0
        self.is_clipped = self.is_clamped = False

    @property
    def num_scored(self) -> int:
        """Scored rows."""
        return self._steps[0].end

    def add(self, layers: Sequence[LayerSpec], result: Replay, n: int, point: int) -> None:
        """Take a stack of layers, for the ``n``-th policy of its family.

        Parameters
        ----------
        layers
            Their specs.
        result
            The replay, from the first row that counts on.
        n
            Number of the policy.
        point
            The eviction point.
        """
        self._first_row = result.first_row
        self._steps = step_buckets(result.first_row - point, len(result.full_R))
        stack = _Stack(self._policy, layers[0], result, n, self._bytes_per_number)
        size = layers[0].num_kv_heads
        heads = np.append(np.arange(size), schema.ALL)
        index = np.array([(one.index, head) for one in layers for head in heads])
        self._index.append(index)
        parts, of_layers = [], []
        for steps in self._steps:
            by_head = stack.columns(steps, self._needle_T, point)
            parts.append({name: array.reshape(-1) for name, array in by_head.items()})
            of_layers.append({name: array[:, -1] for name, array in by_head.items()})
        self._columns.append(parts)
        self._of_layers.append(of_layers)
        for name, row_R in stack.rows().items():
            self._rows[name] = self._rows.get(name, 0) + row_R
        last_T = result.evicted_at_NLGT[n].max((0, 1))
        self._last_evicted_T = np.maximum(self._last_evicted_T, last_T) if self._columns[1:] else last_T
        self.is_clipped |= bool(result.is_clipped_N[n])
        self.is_clamped |= bool(result.is_clamped_N[n])

    def columns(self) -> Iterator[tuple[Steps, np.ndarray, Columns]]:
        """Yield, for each bucket of steps, (layer, KV head) of its rows and their columns."""
        index = np.concatenate([*self._index, [(schema.ALL, schema.ALL)]])
        for place, steps in enumerate(self._steps):
            parts = [columns[place] for columns in self._columns]
            layers = [columns[place] for columns in self._of_layers]
            whole = self._whole(steps, layers)
            names = parts[0]
            yield (
                steps,
                index,
                {
                    name: np.concatenate([*(part[name] for part in parts), [whole[name]]])
                    for name in names
                },
            )

    def _whole(self, steps: Steps, layers: list[Columns]) -> dict[str, Any]:
        """Return the columns of all layers together: bytes row by row, the rest as means."""
        joined = {name: np.concatenate([one[name] for one in layers]) for name in layers[0]}
        whole = {name: _mean(array) for name, array in joined.items()}
        whole |= {name: joined[name].sum() for name in ("num_evicted", "state_bytes")}
        rows = {name: row_R[None, steps.rows] for name, row_R in self._rows.items()}
        whole |= {name: array[0] for name, array in shares(rows).items()}
        end = self._first_row + steps.end
        whole["erased_frac"] = (self._last_evicted_T[:end] < end).mean()
        return whole


class _Stack:
    """One stack under one policy."""

    def __init__(
        self, policy: Policy, layer: LayerSpec, result: Replay, n: int, bytes_per_number: int
    ) -> None:
        self._policy, self._layer, self._result, self._n = policy, layer, result, n
        found, size = result.measures, bytes_per_number * (layer.head_dim + layer.value_dim)
        held_LGR = found.held_NLGR[n].astype(np.float64)
        read_LGR = found.read_NLGR[n].astype(np.float64)
        bytes_LGR = size * held_LGR
        if policy.transform is not None:
            closed_LGR = found.closed_NLGR[n]
            less = size - policy.transform.entry_bytes(layer, bytes_per_number)
            bytes_LGR = bytes_LGR - less * closed_LGR
            bytes_LGR += policy.transform.fixed_bytes(layer, bytes_per_number)
        read_bytes_LGR = bytes_LGR * read_LGR / held_LGR
        index_bytes = 0.0
        if policy.selector is not None:
            index_bytes = policy.selector.index_bytes(layer, bytes_per_number)
            read_bytes_LGR = read_bytes_LGR + index_bytes * held_LGR
        self._state_bytes = policy.scorer.state_bytes(layer.group_size) + index_bytes
        self._held_LGR = held_LGR
        full_LGR = np.broadcast_to(size * result.full_R.astype(np.float64), held_LGR.shape)
        padded_LGR = np.broadcast_to(bytes_LGR.max(1, keepdims=True), held_LGR.shape)
        self._bytes = {
            "held": bytes_LGR,
            "full": full_LGR,
            "padded": padded_LGR,
            "read": read_bytes_LGR,
        }

    def rows(self) -> dict[str, np.ndarray]:
        """Return bytes of the whole stack, row by row."""
        return {name: array.sum((0, 1)) for name, array in self._bytes.items()}

    def columns(self, steps: Steps, needle_T: np.ndarray, point: int) -> Columns:
        """Return columns [L, G + 1] over some rows; the last head is all of the layer together."""
        n, found = self._n, self._result.measures
        columns = shares(
            {
                name: _with_all(array[..., steps.rows], np.sum)
                for name, array in self._bytes.items()
            }
        )
        columns["state_bytes"] = self._state_bytes * _with_all(
            self._held_LGR[..., steps.rows].mean(-1), np.sum
        )
        error_LG, norm_LG = (
            self._by_group(one)[..., steps.rows].sum((2, 3))
            for one in (found.error_sq_NLHR[n], found.norm_sq_LHR)
        )
        columns["output_error"] = _relative(_with_all(error_LG, np.sum), _with_all(norm_LG, np.sum))
        columns["projected_error"] = self._projected(steps)
        means = {
            "output_cosine": found.cosine_NLHR,
            "mass_kept": found.mass_kept_NLHR,
            "attention_kl_nats": found.row_kl_NLHR,
        }
        for name, array in means.items():
            mean_LG = self._by_group(array[n])[..., steps.rows].mean((2, 3))
            columns[name] = _with_all(mean_LG, np.mean)
        overlap_LGR = found.overlap_NLGR[n][..., steps.rows]
        columns["topk_overlap"] = _with_all(_mean(overlap_LGR), np.mean)
        return columns | self._history(steps, needle_T, point)

    def _history(self, steps: Steps, needle_T: np.ndarray, point: int) -> Columns:
        """Return columns about which entries left and when."""
        first = self._result.first_row
        end, start = first + steps.end, first + steps.start
        evicted_at_LGT = self._result.evicted_at_NLGT[self._n]
        gone_LGT = evicted_at_LGT < end
        num_LG = gone_LGT.sum(-1)
        age_LGT = np.where(gone_LGT, evicted_at_LGT - np.arange(evicted_at_LGT.shape[-1]), 0)
        num_with_all = _with_all(num_LG, np.sum)
        later_LGT = gone_LGT & (evicted_at_LGT > max(point, start - 1))
        erased_LT = gone_LGT[..., :end].all(1)
        age = _with_all(age_LGT.sum(-1), np.sum) / np.where(num_with_all, num_with_all, 1)
        columns = {
            "num_evicted": num_with_all,
            "evicted_age_tokens": np.where(num_with_all > 0, age, np.nan),
            "churn": _with_all(later_LGT.sum(-1) / (end - start), np.mean),
            "erased_frac": np.concatenate(
                [gone_LGT[..., :end].mean(-1), erased_LT.mean(-1)[:, None]], axis=1
            ),
            "needle_kept": np.full(num_with_all.shape, np.nan),
            "oracle_overlap": np.full(num_with_all.shape, np.nan),
        }
        if len(needle_T):
            # Held at a row: evicted later than the row was read; a row reads before it is decided.
            row_R = np.arange(start, end)
            held = evicted_at_LGT[..., needle_T][..., None] > row_R
            if self._layer.window is not None:
                held &= needle_T[:, None] > row_R - self._layer.window
            columns["needle_kept"] = _with_all(held.mean((2, 3)), np.mean)
        if steps.name == schema.ANY:
            overlap_LG = self._result.oracle_overlap_NLG[self._n]
            columns["oracle_overlap"] = _with_all(overlap_LG, np.mean)
        return columns

    def _projected(self, steps: Steps) -> np.ndarray:
        """Return the relative error after the output projection; a head's beside the layer's size."""
        found = self._result.measures
        error_LX = found.projected_sq_NLXR[self._n][..., steps.rows].sum(-1)
        norm_LX = found.projected_norm_sq_LXR[..., steps.rows].sum(-1)
        if not error_LX.shape[1]:
            return np.full((len(error_LX), self._layer.num_kv_heads + 1), np.nan)
        return _relative(error_LX, norm_LX)

    def _by_group(self, values_LHR: np.ndarray) -> np.ndarray:
        """Return query-head values as [L, G, M, R], in float64."""
        shape = (len(values_LHR), self._layer.num_kv_heads, self._layer.group_size, -1)
        return np.asarray(values_LHR, dtype=np.float64).reshape(shape)


def shares(bytes_by_name: dict[str, np.ndarray]) -> Columns:
    """Return the columns that follow from bytes held, padded, read and of the full cache.

    Parameters
    ----------
    bytes_by_name
        ``held``, ``padded``, ``read``, ``full``, rows last.
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
    }


def _with_all(array: np.ndarray, join: Any) -> np.ndarray:
    """Return [L, G + 1, ...]: heads, then what ``join`` makes of them."""
    return np.concatenate([array, join(array, axis=1, keepdims=True)], axis=1)


def _relative(error_sq: np.ndarray, norm_sq: np.ndarray) -> np.ndarray:
    """Return sqrt(error / norm); where the full output is zero: 0 without an error, else null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.sqrt(error_sq / norm_sq)
    return np.where(norm_sq > 0, relative, np.where(error_sq > 0, np.nan, 0.0))


def _mean(array: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis of what is a number; NaN where nothing is."""
    there = ~np.isnan(array)
    count = there.sum(-1)
    total = np.where(there, array, 0).sum(-1)
    return np.where(count > 0, total / np.where(count, count, 1), np.nan)
