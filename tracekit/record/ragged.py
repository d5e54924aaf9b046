"""Attention rows of unequal lengths as Arrow columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LISTS = ("top_keys", "top_weights")


def attention_table(
    arrays: Mapping[str, np.ndarray], entries: Sequence[int], top_k: int
) -> dict[str, Any]:
    """Return columns of ``schema.ATTENTION``, heads first, from arrays with a head axis.

    Parameters
    ----------
    arrays
        As ``attention_rows`` gives them: [H, Q], and [H, entries] for rows of unequal lengths.
    entries
        Keys that each query sees.
    top_k
        Most entries in ``top_keys`` and ``top_weights``.
    """
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        if name == "map":
            columns[name] = _binary(array, entries)
        elif name in _LISTS:
            columns[name] = _lists(array, [min(top_k, count) for count in entries])
        else:
            columns[name] = array.reshape(-1)
    return columns


def _lists(array_HS: np.ndarray, counts: Sequence[int]) -> pa.Array:
    offsets = _offsets(array_HS.shape[0], counts).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(array_HS.reshape(-1)))


def _binary(array_HS: np.ndarray, counts: Sequence[int]) -> pa.Array:
    offsets = _offsets(array_HS.shape[0], counts) * array_HS.itemsize
    data = np.ascontiguousarray(array_HS)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _offsets(num_heads: int, counts: Sequence[int]) -> np.ndarray:
    """Return where each row begins, and the end: the same rows for every head."""
    return np.concatenate([[0], np.cumsum(np.tile(counts, num_heads))]).astype(np.int64)
