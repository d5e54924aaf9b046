"""Tensors of a trace as they lie in its shards: found by an index of keys, read by row groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.errors import TraceError
from tracekit.trace.block import NUMPY_DTYPES, Block

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator

    import pandas as pd
    import pyarrow.parquet as pq

    from tracekit.trace.folder import AnyPath, Folder

TENSORS = "tensors.parquet"

INFLUENCE = "influence"
"""Kind of tensor that has probes."""

_KEYS = ["sequence_id", "kind", "layer", "probe", "first_position", "shape", "dtype"]


class TensorFiles:
    """The tensors of all shards; nothing is read before it is asked for, and keys only once.

    Parameters
    ----------
    folder
        Of the trace.
    capture
        Its capture level, for messages.
    """

    def __init__(self, folder: Folder, capture: str) -> None:
        self._folder = folder
        self._capture = capture
        self._files: dict[AnyPath, pq.ParquetFile] = {}
        self._indices: dict[AnyPath, pd.DataFrame] = {}

    def layers(self, shard: AnyPath, sequence_id: str, kind: str) -> list[int]:
        """Return the layers of which a sequence has tensors of one kind."""
        index = self._index(shard)
        is_own = (index["sequence_id"] == sequence_id) & (index["kind"] == kind)
        return sorted(int(layer) for layer in index.loc[is_own, "layer"].unique())

    def joined(
        self, shard: AnyPath, sequence_id: str, layer: int, kinds: Collection[str], *, axis: int
    ) -> dict[str, Block]:
        """Return tensors of one layer by kind, their blocks joined along positions.

        Raises
        ------
        TraceError
            If there is none.
        """
        rows = self._rows(shard, sequence_id, layer)
        rows = rows[rows["kind"].isin(kinds)]
        if rows.empty:
            what = f"{' or '.join(kinds)} of layer {layer}" if layer >= 0 else "final hidden states"
            msg = (
                f"the trace holds no {what} of {sequence_id}: it was recorded with --capture "
                f"{self._capture}, or the layer was left out."
            )
            raise TraceError(msg)
        parts: dict[str, list[np.ndarray]] = {}
        for row, array in self._arrays(shard, rows):
            parts.setdefault(row["kind"], []).append(array)
        dtype = str(rows["dtype"].iloc[0])
        return {
            kind: Block(blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis), dtype)
            for kind, blocks in parts.items()
        }

    def probes(self, shard: AnyPath, sequence_id: str, layer: int) -> Block:
        """Return the influence probes of one layer [P, H, R, D'].

        Raises
        ------
        TraceError
            If there is none.
        """
        rows = self._rows(shard, sequence_id, layer)
        rows = rows[rows["kind"] == INFLUENCE]
        if rows.empty:
            msg = f"{shard / TENSORS} lacks the probes of layer {layer} of {sequence_id}."
            raise TraceError(msg)
        parts: dict[int, list[np.ndarray]] = {}
        for row, array in self._arrays(shard, rows):
            parts.setdefault(int(row["first_position"]), []).append(array)
        joined = np.concatenate([np.stack(own) for own in parts.values()], axis=2)
        return Block(joined, str(rows["dtype"].iloc[0]))

    def _rows(self, shard: AnyPath, sequence_id: str, layer: int) -> pd.DataFrame:
        """Return the rows of one layer in the index of a shard, by position and probe."""
        index = self._index(shard)
        rows = index[(index["sequence_id"] == sequence_id) & (index["layer"] == layer)]
        return rows.sort_values(["first_position", "probe"], kind="stable")

    def _arrays(
        self, shard: AnyPath, rows: pd.DataFrame
    ) -> Iterator[tuple[dict[Hashable, Any], np.ndarray]]:
        """Yield each row of the index with its tensor; a row group is read once."""
        for group, members in rows.groupby("row_group", sort=False):
            with self._folder.explained(shard / TENSORS):
                data = self._file(shard).read_row_group(int(str(group)), columns=["data"])["data"]
            for row in members.to_dict("records"):
                raw = np.frombuffer(
                    data[row["row_in_group"]].as_buffer(), NUMPY_DTYPES[row["dtype"]]
                )
                yield row, raw.reshape(row["shape"])

    def _file(self, shard: AnyPath) -> pq.ParquetFile:
        if shard not in self._files:
            path = shard / TENSORS
            if not self._folder.exists(path):
                msg = f"{path} is missing: the trace was recorded with --capture {self._capture}."
                raise TraceError(msg)
            self._files[shard] = self._folder.parquet(path)
        return self._files[shard]

    def _index(self, shard: AnyPath) -> pd.DataFrame:
        """Return the key columns of a shard's tensors and the row group of each row."""
        if shard not in self._indices:
            file = self._file(shard)
            with self._folder.explained(shard / TENSORS):
                frame = file.read(columns=_KEYS).to_pandas()
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            frame["row_group"] = np.repeat(np.arange(len(sizes)), sizes)
            frame["row_in_group"] = np.concatenate([np.arange(size) for size in sizes])
            self._indices[shard] = frame
        return self._indices[shard]
