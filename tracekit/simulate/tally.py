"""The rows of results of one policy on one sequence: heads, layers, all together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tracekit import schema
from tracekit.simulate.accounts import Columns, mean_of, shares

if TYPE_CHECKING:
    from tracekit.simulate.accounts import Accounts
    from tracekit.simulate.steps import Steps


class Tallied(NamedTuple):
    """What one policy did on one sequence, as columns [buckets, rows].

    Parameters
    ----------
    buckets
        Of steps.
    rows
        (Layer, KV head) of the rows of a bucket; the last row is that of all layers together.
    columns
        Values by name.
    """

    buckets: list[Steps]
    rows: np.ndarray
    columns: Columns


class Tally:
    """What one policy did on one sequence, taken in layer stack by layer stack."""

    def __init__(self) -> None:
        self._steps: list[Steps] = []
        self._index: list[np.ndarray] = []
        self._columns: list[list[Columns]] = []
        self._rows: dict[str, np.ndarray] = {}
        self._last_evicted_T = np.zeros(0, dtype=np.int32)
        self._first_row = 0
        self.is_clipped = self.is_clamped = False

    def add(self, stack: Accounts, n: int) -> None:
        """Take the ``n``-th policy of a family on a stack of layers."""
        result = stack.held
        self._first_row, self._steps = result.first_row, stack.steps
        self._index.append(stack.index)
        self._columns.append(
            [{name: array[n] for name, array in part.items()} for part in stack.columns]
        )
        for name, row_NR in stack.rows.items():
            self._rows[name] = self._rows.get(name, 0) + row_NR[n]
        last_T = result.evicted_at_NLGT[n].max((0, 1))
        before_T = self._last_evicted_T
        self._last_evicted_T = np.maximum(before_T, last_T) if len(before_T) else last_T
        self.is_clipped |= bool(result.is_clipped_N[n])
        self.is_clamped |= bool(result.is_clamped_N[n])

    def columns(self) -> Tallied:
        """Return all of it."""
        index = np.concatenate([*self._index, [(schema.ALL, schema.ALL)]])
        by_steps = []
        for place, steps in enumerate(self._steps):
            parts = [columns[place] for columns in self._columns]
            whole = self._whole(steps, parts)
            by_steps.append(
                {
                    name: np.concatenate([*(part[name].reshape(-1) for part in parts), [value]])
                    for name, value in whole.items()
                }
            )
        columns = {name: np.stack([one[name] for one in by_steps]) for name in by_steps[0]}
        return Tallied(self._steps, index, columns)

    def _whole(self, steps: Steps, parts: list[Columns]) -> dict[str, Any]:
        """Return the columns of all layers together: bytes row by row, the rest as means."""
        joined = {name: np.concatenate([one[name][:, -1] for one in parts]) for name in parts[0]}
        whole: dict[str, Any] = {name: mean_of(array) for name, array in joined.items()}
        whole["num_evicted"] = (num := joined["num_evicted"]).sum()
        ages = np.where(num > 0, joined["evicted_age_tokens"], 0) * num
        whole["evicted_age_tokens"] = ages.sum() / num.sum() if num.any() else np.nan
        rows = {name: row_R[None, steps.rows] for name, row_R in self._rows.items()}
        whole |= {name: array[0] for name, array in shares(rows).items()}
        end = self._first_row + steps.end
        whole["erased_frac"] = (self._last_evicted_T[:end] < end).mean()
        return whole
