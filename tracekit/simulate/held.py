"""What is left of a cache under a policy: by position, the part of the KV heads that hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tracekit import schema

if TYPE_CHECKING:
    from tracekit.kv.policy import Policy
    from tracekit.simulate.accounts import Accounts


class HeldEntries:
    """KV heads that hold each entry while the last row is read, taken in layer stack by stack.

    What is evicted later is read by no row. Recall policies evict nothing.
    """

    def __init__(self) -> None:
        self._held_T = self._full_T = np.zeros(1, dtype=np.int64)
        self._point = 0

    def add(self, stack: Accounts, n: int) -> None:
        """Take the ``n``-th policy of a family on a stack of layers."""
        evicted_at_LGT = stack.held.evicted_at_NLGT[n]
        *heads, num_rows = evicted_at_LGT.shape
        window = stack.layer.window or num_rows
        in_window_T = np.arange(num_rows) >= num_rows - window
        held_LGT = (evicted_at_LGT >= num_rows) & in_window_T
        self._held_T = self._held_T + held_LGT.sum((0, 1))
        self._full_T = self._full_T + np.prod(heads) * in_window_T
        self._point = stack.point

    def row(self, policy: Policy, sequence_id: str) -> pa.Table:
        """Return the row of ``schema.HELD`` of a policy on a sequence, all stacks taken."""
        part_T = np.where(self._full_T > 0, self._held_T / np.maximum(self._full_T, 1), np.nan)
        parts = pa.array(part_T, pa.float32(), from_pandas=True)
        columns = {
            "sequence_id": sequence_id,
            "policy": policy.text,
            "family": policy.family,
            "point": self._point,
            "held_frac": pa.ListArray.from_arrays(pa.array([0, len(parts)], pa.int32()), parts),
        }
        return schema.HELD.build(1, columns)
