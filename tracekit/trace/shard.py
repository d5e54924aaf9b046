"""One open shard: whole sequences, written beside the trace and moved into it when closed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tracekit import schema
from tracekit.trace import layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracekit.trace.folder import Folder

TENSOR_KEYS = ["sequence_id", "kind", "layer", "probe", "first_position"]

ROW_GROUP_BYTES = 16 << 20
"""Rows of a table other than tensors wait until so many bytes, or their sequence's end."""


class Shard:
    """A shard being written in the folder's ``open_path`` on this machine.

    Rows of a sequence reach the disk as they come; ``end_sequence`` makes the sequence part of the
    shard. Rows of a sequence that never ended stay in the files and are seen by no reader, since
    ``sequences.parquet`` does not name it.

    Parameters
    ----------
    trace
        Where the trace lives.
    number
        Number of the shard.

    Attributes
    ----------
    num_bytes
        Bytes of the rows so far, before compression.
    is_damaged
        Whether a write failed: such a shard can only be dropped.
    """

    def __init__(self, trace: Folder, number: int) -> None:
        self._trace = trace
        self._number = number
        self._folder = trace.open_path / f"{number:05d}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._waiting: dict[str, list[pa.Table]] = {}
        self._waiting_bytes: dict[str, int] = {}
        self._sequences: list[pa.Table] = []
        self.num_bytes = 0
        self.is_damaged = False

    @property
    def num_sequences(self) -> int:
        """Sequences that have ended."""
        return len(self._sequences)

    def append(self, table: schema.Table, num_rows: int, columns: Mapping[str, Any]) -> None:
        """Add rows of one table; tensors are written at once, as a row group of their own."""
        rows = table.build(num_rows, columns)
        self.num_bytes += rows.nbytes
        self._waiting.setdefault(table.name, []).append(rows)
        size = self._waiting_bytes[table.name] = (
            self._waiting_bytes.get(table.name, 0) + rows.nbytes
        )
        if table is schema.TENSORS or size >= ROW_GROUP_BYTES:
            self._write(table.name)

    def append_blocks(
        self,
        sequence_id: str,
        layer: int,
        first_position: int,
        blocks: Mapping[str, np.ndarray],
        dtype: str,
    ) -> None:
        """Write the tensors of one layer and one stretch of positions as one row group.

        Parameters
        ----------
        sequence_id, layer, first_position
            Where the blocks belong; layer -1 is the final hidden state.
        blocks
            By kind; bfloat16 comes as its bits in uint16.
        dtype
            ``float32``, ``float16`` or ``bfloat16``.
        """
        kinds = {"kind": list(blocks)}
        self._append_tensors(
            sequence_id, layer, first_position, kinds, list(blocks.values()), dtype
        )

    def append_probes(
        self,
        sequence_id: str,
        layer: int,
        first_position: int,
        gradient_PHRD: np.ndarray,
        dtype: str,
    ) -> None:
        """Write the probes of one layer and one stretch of rows as one row group.

        Parameters
        ----------
        sequence_id, layer, first_position
            Where they belong.
        gradient_PHRD
            Gradients at the layer's attention output; bfloat16 comes as its bits in uint16.
        dtype
            ``float32``, ``float16`` or ``bfloat16``.
        """
        kinds = {"kind": "influence", "probe": np.arange(len(gradient_PHRD))}
        self._append_tensors(sequence_id, layer, first_position, kinds, list(gradient_PHRD), dtype)

    def _append_tensors(
        self,
        sequence_id: str,
        layer: int,
        first_position: int,
        kinds: Mapping[str, Any],
        blocks: list[np.ndarray],
        dtype: str,
    ) -> None:
        arrays = [np.ascontiguousarray(block) for block in blocks]
        columns = {
            "sequence_id": sequence_id,
            "layer": layer,
            "first_position": first_position,
            "shape": [list(array.shape) for array in arrays],
            "dtype": dtype,
            "data": _binary(arrays),
            **kinds,
        }
        self.append(schema.TENSORS, len(arrays), columns)

    def end_sequence(self, columns: Mapping[str, Any]) -> None:
        """Enter a finished sequence."""
        for name in list(self._waiting):
            self._write(name)
        self._sequences.append(schema.SEQUENCES.build(1, columns))

    def close(self) -> None:
        """Make the shard part of the trace; once more, if a first time was interrupted.

        Raises
        ------
        OSError
            If the disk refuses; the shard can only be dropped then.
        InputError
            The same of a remote store.
        """
        numbers = (int(shard.name) for shard in self._trace.shards())
        if not self._folder.exists() and self._number in numbers:
            return  # moved already: the interruption came right after
        for writer in self._writers.values():
            writer.close()
        paths = sorted(self._folder.glob("*.parquet"))
        files = {path.name: layout.entry(path) for path in paths if path.name != layout.LISTING}
        rows = pa.concat_tables(self._sequences)
        rows = rows.replace_schema_metadata({layout.FILES_KEY: json.dumps(files)})
        pq.write_table(rows, self._folder / layout.LISTING, compression="zstd")
        self._trace.add_shard(self._folder, self._number)

    def discard(self) -> None:
        """Drop the shard and what it holds."""
        self._waiting.clear()
        for writer in self._writers.values():
            # A full disk fails the footer too; the folder goes either way.
            try:
                writer.close()
            except (OSError, pa.ArrowException):
                continue
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str) -> None:
        """Write the rows of a table that wait."""
        rows = pa.concat_tables(self._waiting.pop(name)).unify_dictionaries()
        self._waiting_bytes[name] = 0
        try:
            if name not in self._writers:
                path = self._folder / f"{name}.parquet"
                self._writers[name] = pq.ParquetWriter(
                    path, rows.schema, **_options(rows.schema, name)
                )
            self._writers[name].write_table(rows)
        except Exception:
            self.is_damaged = True  # half a row group may be in the file: no footer helps
            raise


def _options(rows: pa.Schema, name: str) -> dict[str, Any]:
    """Return writer options: tensors as they are, numbers without dictionaries, texts with."""
    if name == schema.TENSORS.name:
        return {"compression": "none", "use_dictionary": False, "write_statistics": TENSOR_KEYS}
    texts = [column.name for column in rows if pa.types.is_dictionary(column.type)]
    return {"compression": "zstd", "compression_level": 1, "use_dictionary": texts}


def _binary(arrays: list[np.ndarray]) -> pa.Array:
    """Return contiguous arrays as one large_binary column; the bytes are copied once."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    data = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(arrays), buffers)
