"""What a KV cache holds, layer by layer, counted from its tensors and never from a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_BOOKKEEPING = frozenset(
    {"_sliding_window_tensor", "cumulative_length", "indexer_cumulative_length"}
)
"""Tensors in which a cache layer keeps counts, not contents."""

_HOLDERS = (torch.Tensor, dict, list, tuple)
"""Types of attributes in which tensors may be found."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What one layer of a cache holds.

    Parameters
    ----------
    layer
        Layer number.
    entries
        Keys that a head holds (in a cache of fixed size: for which it has room); 0 in layers that
        hold none.
    logical_bytes
        Bytes of the tensors' numbers, keys, values, states and scales together.
    resident_bytes
        Bytes of the storage behind them; a sliding layer's keys are a view that keeps dropped
        tokens alive. Storage that layers share is counted in the first of them.
    """

    layer: int
    entries: int
    logical_bytes: int
    resident_bytes: int


def cache_layers(cache: Any) -> list[LayerBytes]:
    """Return what each layer of a cache holds; reads metadata only, so no device is waited for.

    Parameters
    ----------
    cache
        A cache of transformers: dynamic, sliding, static, quantised, linear, or mixed.

    Returns
    -------
    list of LayerBytes
        In the order of layers.
    """
    counted: set[tuple[torch.device, int]] = set()
    return [_layer(index, layer, counted) for index, layer in enumerate(cache.layers)]


def _layer(index: int, layer: Any, counted: set[tuple[torch.device, int]]) -> LayerBytes:
    tensors: list[torch.Tensor] = []
    for name, value in vars(layer).items():
        # This runs at every step for every layer: plain tensors and numbers take the short way.
        if type(value) is torch.Tensor:
            tensors += [] if name in _BOOKKEEPING else [value]
        elif isinstance(value, _HOLDERS) and name not in _BOOKKEEPING:
            tensors += _tensors(value)
    resident = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        place = (tensor.device, storage.data_ptr())
        if place not in counted:
            counted.add(place)
            resident += storage.nbytes()
    return LayerBytes(
        layer=index,
        entries=_entries(layer),
        logical_bytes=sum(tensor.nbytes for tensor in tensors),
        resident_bytes=resident,
    )


def _entries(layer: Any) -> int:
    """Return the keys that a head holds."""
    if getattr(layer, "_quantized_keys", None) is not None:
        # Packed codes do not have the shape of keys; such layers count their tokens themselves.
        return int(layer.cumulative_length)
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.ndim != 4 else int(keys.shape[-2])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a cache layer's attribute: nested, or packed in a subclass."""
    if isinstance(value, torch.Tensor):
        packed = getattr(value, "__tensor_flatten__", None)
        if packed is None:
            yield value
        else:
            yield from (getattr(value, name) for name in packed()[0])
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
