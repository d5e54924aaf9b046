"""Recorded layers as references: runs of like layers, stacked, each stack of bounded size."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit.kv.budget import Cache
from tracekit.kv.reference import Reference
from tracekit.measure.tensors import to_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.spec import LayerSpec
    from tracekit.trace.reader import Trace

STACK_BYTES = 256 << 20
"""Queries, keys, values and probes of the layers that are replayed together."""

_NAMES = {"query": "query_LHTD", "key": "key_LGTD", "value": "value_LGTD"}


class Stacks:
    """The layers of one recorded sequence that can be replayed.

    Parameters
    ----------
    trace
        Recorded with queries, keys and values.
    sequence_id
        Its sequence.
    bytes_per_number
        Of a number of the cache, for the accounting.
    probes
        Read influence probes too, of the layers that have them.
    """

    def __init__(
        self, trace: Trace, sequence_id: str, bytes_per_number: int, *, probes: bool = False
    ) -> None:
        self._trace, self._sequence_id = trace, sequence_id
        self._probed = probed_layers(trace, sequence_id) if probes else frozenset()
        stored = set(trace.stored_layers(sequence_id))
        layers = [one for one in trace.spec.layers if one.index in stored and can_replay(one)]
        self.cache = Cache(tuple(layers), bytes_per_number)
        self._last: tuple[list[LayerSpec], Reference] | None = None

    def __iter__(self) -> Iterator[tuple[list[LayerSpec], Reference]]:
        """Yield layers and their reference; where all layers are one stack it is kept."""
        if self._last is not None and len(self._last[0]) == len(self.cache.layers):
            yield self._last
            return
        for _, alike in groupby(self.cache.layers, key=self._kind):
            run = list(alike)
            size = max(1, STACK_BYTES // self._num_bytes(run[0]))
            for start in range(0, len(run), size):
                self._last = (part := run[start : start + size], self._reference(part))
                yield self._last

    def _kind(self, layer: LayerSpec) -> tuple[Any, ...]:
        return (*_shape(layer), layer.index in self._probed)

    def _num_bytes(self, layer: LayerSpec) -> int:
        tensors = [*self._blocks(layer).values(), *self._influence([layer]).values()]
        return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))

    def _reference(self, layers: list[LayerSpec]) -> Reference:
        blocks = [self._blocks(one) for one in layers]
        projections = [self._trace.output_projection(one.index) for one in layers]
        weights = [to_torch(one[0].data, one[0].dtype) for one in projections if one is not None]
        rope = layers[0].rope
        tensors: dict[str, Any] = {
            name: torch.stack([block[kind] for block in blocks]) for kind, name in _NAMES.items()
        }
        return Reference(
            **tensors,
            **self._influence(layers),
            layer=layers[0],
            rope=None if rope is None else self._trace.spec.ropes[rope],
            projection_LEX=torch.stack(weights) if len(weights) == len(layers) else None,
        )

    def _influence(self, layers: list[LayerSpec]) -> dict[str, Any]:
        """Return what a reference takes of probes; nothing for layers without."""
        numbers = [one.index for one in layers if one.index in self._probed]
        return influence_of(self._trace, self._sequence_id, numbers)

    def _blocks(self, layer: LayerSpec) -> dict[str, torch.Tensor]:
        blocks = self._trace.attention_inputs(self._sequence_id, layer.index)
        return {kind: to_torch(block.data, block.dtype) for kind, block in blocks.items()}


def influence_of(trace: Trace, sequence_id: str, layers: Sequence[int]) -> dict[str, Any]:
    """Return what a ``Reference`` of layers takes of their probes; nothing where there are none."""
    found = [trace.influence(sequence_id, number) for number in layers]
    probes = [one for one in found if one is not None]
    if not probes:
        return {}
    gradients = [to_torch(block.data, block.dtype) for _, block in probes]
    return {"influence_LPHRD": torch.stack(gradients), "influence_from": probes[0][0]}


def probed_layers(trace: Trace, sequence_id: str) -> frozenset[int]:
    """Return the layers at whose attention outputs a sequence has influence probes."""
    probes = trace.manifest["settings"].get("probes")
    if probes is None or probed_from(trace, sequence_id) is None:
        return frozenset()
    return frozenset(probes["layers"])


def probed_from(trace: Trace, sequence_id: str) -> int | None:
    """Return the first row of a sequence that has influence probes; None if none has."""
    first = trace.sequences.set_index("sequence_id")["probed_from"][sequence_id]
    return None if np.isnan(first) else int(first)


def why_no_layer(trace: Trace) -> str | None:
    """Return why no layer of a trace's model can be replayed; None if some can."""
    layers = trace.spec.layers
    if any(can_replay(one) for one in layers):
        return None
    refusals = [one.refusal for one in layers if one.refusal]
    return f"no layer can be replayed ({refusals[0] if refusals else 'none holds keys'})"


def can_replay(layer: LayerSpec) -> bool:
    """Return whether a layer has keys of its own and attention that could be checked."""
    return layer.holds_keys and not layer.refusal


def _shape(layer: LayerSpec) -> tuple[Any, ...]:
    """Return what layers must share to be replayed together; layers with sinks go alone."""
    alone = layer.index if layer.sinks is not None else None
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.value_dim,
        layer.scale,
        layer.window,
        layer.softcap,
        layer.alibi,
        layer.rope,
        alone,
    )
