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
from tracekit.trace.block import Block
from tracekit.trace.manifest import read_manifest
from tracekit.trace.open_folder import open_folder
from tracekit.trace.tensor_files import TensorFiles
from tracekit.trace.weights import PROJECTION_BIAS, PROJECTION_WEIGHT, Weights

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    import pandas as pd

    from tracekit.trace.folder import AnyPath

__all__ = ["Block", "Trace"]

_ATTENTION = ("query", "key", "value")
"""Kinds of tensors that attention is made of."""

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
        self._tensors = TensorFiles(self.folder, self.capture)

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
        return self._joined(sequence_id, -1, ["hidden"], axis=0)["hidden"]

    @property
    def residual_layers(self) -> tuple[int, ...]:
        """Layers whose outgoing hidden states are stored, in order."""
        return tuple(self.manifest["settings"].get("hidden_layers", ()))

    def residual(self, sequence_id: str, layer: int) -> Block:
        """Return the hidden states [T, E] that leave a decoder layer, before the final norm.

        ``measure.norm.Norm`` and the head make logits of them: the logit lens.

        Raises
        ------
        UsageError
            If there is no such sequence, or the layer was not recorded.
        TraceError
            If they should be there and are not.
        """
        if layer not in self.residual_layers:
            listed = ", ".join(map(str, self.residual_layers))
            msg = (
                f"the trace holds hidden states of {f'layers {listed}' if listed else 'no layer'}, so "
                f"none of layer {layer}; record with --hidden-layers {layer}."
            )
            raise UsageError(msg)
        return self._joined(sequence_id, layer, ["residual"], axis=0)["residual"]

    def embedding(self) -> Block:
        """Return the input embedding [V, E], the head's weight where it is tied to it.

        Raises
        ------
        TraceError
            If it was not stored, or the file of weights is damaged.
        """
        name = "head.weight" if self.spec.head.is_tied else "embedding.weight"
        found = self._weight(name)
        if found is None:
            msg = f"{self.path} holds no input embedding; record with --head store."
            raise TraceError(msg)
        return found

    def attention_inputs(self, sequence_id: str, layer: int) -> dict[str, Block]:
        """Return ``query`` [H, T, D], ``key`` and ``value`` [G, T, D] of one layer, post-RoPE.

        Keys and values of a layer that shares another's are that one's.
        """
        self._check_layer(layer)
        blocks = self._joined(sequence_id, layer, _ATTENTION, axis=1)
        owner = self.spec.layers[layer].owner
        if owner is None:
            return blocks
        return self._joined(sequence_id, owner, _ATTENTION, axis=1) | blocks

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
        return int(first), self._tensors.probes(shard, sequence_id, layer)

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
        return self._tensors.layers(self._shard_of(sequence_id), sequence_id, "query")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.spec.layers):
            msg = f"there is no layer {layer}: layers are 0 to {len(self.spec.layers) - 1}."
            raise UsageError(msg)

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.folder)

    def _weight(self, name: str) -> Block | None:
        return Block(*self._weights.read(name)) if name in self._weights.names else None

    def _joined(
        self, sequence_id: str, layer: int, kinds: Collection[str], *, axis: int
    ) -> dict[str, Block]:
        shard = self._shard_of(sequence_id)
        return self._tensors.joined(shard, sequence_id, layer, kinds, axis=axis)

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
