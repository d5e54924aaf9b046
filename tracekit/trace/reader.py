"""Read a trace: tables as pandas, tensor blocks as numpy, each only when asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracekit.errors import TraceError, UsageError
from tracekit.registry import unknown
from tracekit.schema import SEQUENCES, SHARD_TABLES
from tracekit.spec import ModelSpec
from tracekit.trace import layout
from tracekit.trace.block import NUMPY_DTYPES, Block
from tracekit.trace.manifest import read_manifest
from tracekit.trace.open_folder import open_folder
from tracekit.trace.weights import PROJECTION_BIAS, PROJECTION_WEIGHT, Weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from pathlib import Path

    import pandas as pd
    import pyarrow.parquet as pq

    from tracekit.trace.folder import AnyPath

__all__ = ["Block", "Trace"]

TENSORS = "tensors.parquet"

INFLUENCE = "influence"
"""Kind of tensor that has probes."""

_TABLES = {table.name: table for table in SHARD_TABLES}


class Trace:
    """A recorded run.

    Opening reads ``trace.json`` alone.

    Parameters
    ----------
    path
        Folder of the trace, or a URL of fsspec (``s3://bucket/trace``); remote files are read where
        they are, as far as they are asked for.

    Raises
    ------
    TraceError
        If the folder is no trace, of another schema version, or cannot be reached.
    UsageError
        If nothing that is installed speaks the URL's protocol.
    """

    def __init__(self, path: str | AnyPath) -> None:
        self.folder = open_folder(path)
        self.path = self.folder.path
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        self.spec = ModelSpec.from_json(self.manifest["model"])
        self.capture: str = self.manifest["settings"]["capture"]
        self._files: dict[AnyPath, pq.ParquetFile] = {}
        self._indices: dict[AnyPath, pd.DataFrame] = {}

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}: {self.spec.name}, {len(self.sequences)} sequences)"

    @cached_property
    def shards(self) -> list[AnyPath]:
        """Folders of the closed shards, in order."""
        return self.folder.shards()

    @cached_property
    def sequences(self) -> pd.DataFrame:
        """The table of sequences (``schema.SEQUENCES``), in the order of recording."""
        # Joined before pandas sees them: types must not depend on which shard has a null.
        parts = [SEQUENCES.schema.empty_table(), *self._listings.values()]
        frame: pd.DataFrame = pa.concat_tables(parts, promote_options="permissive").to_pandas()
        return frame

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the trace."""
        return self.folder.num_bytes()

    @property
    def sequence_ids(self) -> list[str]:
        """Ids of the sequences, in the order of recording."""
        return [str(name) for name in self.sequences["sequence_id"]]

    def table(
        self,
        name: str,
        *,
        sequence_id: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Return a table of the trace (``schema.SHARD_TABLES``).

        Parameters
        ----------
        name
            ``tokens``, ``steps``, ``kv``, ``attention``, ``keys``.
        sequence_id
            Read the rows of this sequence only.
        columns
            Read these columns only.

        Raises
        ------
        UsageError
            If there is no such table or sequence.
        TraceError
            If this trace was captured without it.
        """
        known = [table.name for table in SHARD_TABLES if table.name not in ("sequences", "tensors")]
        if name not in known:
            raise UsageError(unknown("table", name, known))
        shards = self.shards if sequence_id is None else [self._shard_of(sequence_id)]
        paths = [shard / f"{name}.parquet" for shard in shards]
        if missing := [path for path in paths if not self.folder.exists(path)]:
            msg = (
                f"{missing[0]} is missing: --capture {self.capture} of this model does not write it, "
                "or the trace is damaged, which tracekit validate tells."
            )
            raise TraceError(msg)
        if not shards:
            nothing: pd.DataFrame = _TABLES[name].schema.empty_table().to_pandas()
            return nothing
        only = None if sequence_id is None else [("sequence_id", "=", sequence_id)]
        # The ids are read in any case: they tell which rows belong to a sequence that ended.
        names = None if columns is None else list(dict.fromkeys([*columns, "sequence_id"]))
        parts = [
            self._ended(shard, self.folder.read_table(path, columns=names, filters=only))
            for shard, path in zip(shards, paths, strict=True)
        ]
        rows = pa.concat_tables(parts, promote_options="permissive")
        frame: pd.DataFrame = (rows if columns is None else rows.select(columns)).to_pandas()
        return frame

    def vocabulary(self) -> pd.DataFrame:
        """Return the table of tokens (``schema.VOCAB``): bytes, readable text, class."""
        frame: pd.DataFrame = self.folder.read_table(self.path / layout.VOCABULARY).to_pandas()
        return frame

    @property
    def has_head(self) -> bool:
        """Whether the language-model head was stored."""
        return "head.weight" in self._weights.names

    @property
    def weights_path(self) -> Path:
        """Local file of the stored weights, downloaded once where the trace is remote.

        Raises
        ------
        TraceError
            If there are none.
        """
        if not self.folder.exists(self.path / layout.WEIGHTS):
            msg = f"{self.path} holds no {layout.WEIGHTS}; record with --head store."
            raise TraceError(msg)
        return self.folder.fetch(layout.WEIGHTS)

    def output_projection(self, layer: int) -> tuple[Block, Block | None] | None:
        """Return the matrix [E, H * D'] and bias [E] that follow a layer's attention output.

        Head h is read by columns h * D' to (h + 1) * D'. None for the bias where there is none, and
        for both where they were not stored: without --store-oproj, or as the recorder said then.

        Raises
        ------
        UsageError
            If there is no such layer.
        TraceError
            If the file of weights is damaged.
        """
        self._check_layer(layer)
        weight = self._weight(PROJECTION_WEIGHT.format(layer))
        return None if weight is None else (weight, self._weight(PROJECTION_BIAS.format(layer)))

    def hidden(self, sequence_id: str) -> Block:
        """Return the final hidden states [T, E]; row t predicts token t + 1."""
        return self._joined(sequence_id, -1, axis=0)["hidden"]

    def attention_inputs(self, sequence_id: str, layer: int) -> dict[str, Block]:
        """Return ``query`` [H, T, D], ``key`` and ``value`` [G, T, D] of one layer, post-RoPE.

        Keys and values of a layer that shares another's are that one's.
        """
        self._check_layer(layer)
        blocks = self._joined(sequence_id, layer, axis=1)
        owner = self.spec.layers[layer].owner
        return blocks if owner is None else self._joined(sequence_id, owner, axis=1) | blocks

    def influence(self, sequence_id: str, layer: int) -> tuple[int, Block] | None:
        """Return the influence probes of one layer and the position of their first row.

        Returns
        -------
        tuple of int and Block, or None
            First row, and gradients of P probes' losses, in nats a unit of the attention output
            before the output projection, [P, H, R, D'] at the R rows from there on. None if the
            sequence has no probes, or the layer was not chosen.

        Raises
        ------
        UsageError
            If there is no such sequence or layer.
        TraceError
            If they should be there and are not.
        """
        self._check_layer(layer)
        shard = self._shard_of(sequence_id)
        probes = self.manifest["settings"].get("probes")
        first = self.sequences.set_index("sequence_id")["probed_from"][sequence_id]
        if probes is None or np.isnan(first) or layer not in probes["layers"]:
            return None
        rows = self._rows(shard, sequence_id, layer)
        rows = rows[rows["kind"] == INFLUENCE]
        if rows.empty:
            msg = f"{shard / TENSORS} lacks the probes of layer {layer} of {sequence_id}."
            raise TraceError(msg)
        parts: dict[int, list[np.ndarray]] = {}
        for row, array in self._arrays(shard, rows):
            parts.setdefault(int(row["first_position"]), []).append(array)
        joined = np.concatenate([np.stack(own) for own in parts.values()], axis=2)
        return int(first), Block(joined, str(rows["dtype"].iloc[0]))

    def attention_map(self, sequence_id: str, layer: int) -> np.ndarray:
        """Return the attention of one layer, float16 [H, T, T]; what a query does not see is 0.

        Raises
        ------
        UsageError
            If the map of this layer was not stored.
        """
        columns = ["sequence_id", "layer", "head", "query", "map"]
        rows = self.table("attention", sequence_id=sequence_id, columns=columns)
        rows = rows[rows["layer"] == layer]
        if rows.empty or rows["map"].isna().any():
            msg = f"the trace holds no map of layer {layer}; record with --maps {layer}."
            raise UsageError(msg)
        size = int(rows["query"].max()) + 1
        weights_HTT = np.zeros((int(rows["head"].max()) + 1, size, size), np.float16)
        for head, query, data in zip(rows["head"], rows["query"], rows["map"], strict=True):
            row = np.frombuffer(data, np.float16)
            weights_HTT[head, query, query + 1 - len(row) : query + 1] = row
        return weights_HTT

    def stored_layers(self, sequence_id: str) -> list[int]:
        """Return the layers whose queries, keys and values are stored."""
        index = self._index(self._shard_of(sequence_id))
        is_own = (index["sequence_id"] == sequence_id) & (index["kind"] == "query")
        return sorted(int(layer) for layer in index.loc[is_own, "layer"].unique())

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.spec.layers):
            msg = f"there is no layer {layer}: layers are 0 to {len(self.spec.layers) - 1}."
            raise UsageError(msg)

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.folder)

    def _weight(self, name: str) -> Block | None:
        return Block(*self._weights.read(name)) if name in self._weights.names else None

    def _joined(self, sequence_id: str, layer: int, *, axis: int) -> dict[str, Block]:
        """Return the tensors of one layer by kind, their blocks joined along positions."""
        shard = self._shard_of(sequence_id)
        rows = self._rows(shard, sequence_id, layer)
        rows = rows[rows["kind"] != INFLUENCE]
        if rows.empty:
            what = f"tensors of layer {layer}" if layer >= 0 else "final hidden states"
            msg = (
                f"the trace holds no {what} of {sequence_id}: it was recorded with --capture "
                f"{self.capture}, or the layer was left out."
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

    def _rows(self, shard: AnyPath, sequence_id: str, layer: int) -> pd.DataFrame:
        """Return the rows of one layer in the index of a shard's tensors, by position and probe."""
        index = self._index(shard)
        rows = index[(index["sequence_id"] == sequence_id) & (index["layer"] == layer)]
        return rows.sort_values(["first_position", "probe"], kind="stable")

    def _arrays(
        self, shard: AnyPath, rows: pd.DataFrame
    ) -> Iterator[tuple[dict[Hashable, Any], np.ndarray]]:
        """Yield each row of the index with its tensor; a row group is read once."""
        for group, members in rows.groupby("row_group", sort=False):
            with self.folder.explained(shard / TENSORS):
                data = self._file(shard).read_row_group(int(str(group)), columns=["data"])["data"]
            for row in members.to_dict("records"):
                raw = np.frombuffer(
                    data[row["row_in_group"]].as_buffer(), NUMPY_DTYPES[row["dtype"]]
                )
                yield row, raw.reshape(row["shape"])

    def _ended(self, shard: AnyPath, rows: pa.Table) -> pa.Table:
        """Return the rows of a shard's own sequences: others never ended, or ended elsewhere."""
        ids = self._listings[shard]["sequence_id"].combine_chunks()
        return rows.filter(pc.is_in(rows["sequence_id"].cast(pa.string()), ids))

    def _shard_of(self, sequence_id: str) -> AnyPath:
        if sequence_id not in self._places:
            raise UsageError(unknown("sequence", sequence_id, list(self._places)))
        return self._places[sequence_id]

    @cached_property
    def _listings(self) -> dict[AnyPath, pa.Table]:
        """The sequences of each shard."""
        return {shard: self.folder.read_table(shard / layout.LISTING) for shard in self.shards}

    @cached_property
    def _places(self) -> dict[str, AnyPath]:
        return {
            str(name): shard
            for shard, rows in self._listings.items()
            for name in rows["sequence_id"].to_pylist()
        }

    def _file(self, shard: AnyPath) -> pq.ParquetFile:
        if shard not in self._files:
            path = shard / TENSORS
            if not self.folder.exists(path):
                msg = f"{path} is missing: the trace was recorded with --capture {self.capture}."
                raise TraceError(msg)
            self._files[shard] = self.folder.parquet(path)
        return self._files[shard]

    def _index(self, shard: AnyPath) -> pd.DataFrame:
        """Return the key columns of a shard's tensors and the row group of each row."""
        if shard not in self._indices:
            file = self._file(shard)
            names = ["sequence_id", "kind", "layer", "probe", "first_position", "shape", "dtype"]
            with self.folder.explained(shard / TENSORS):
                frame = file.read(columns=names).to_pandas()
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            frame["row_group"] = np.repeat(np.arange(len(sizes)), sizes)
            frame["row_in_group"] = np.concatenate([np.arange(size) for size in sizes])
            self._indices[shard] = frame
        return self._indices[shard]
