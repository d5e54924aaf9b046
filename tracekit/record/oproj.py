"""Output projections on their way into the trace, and what is said of those that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.trace.weights import PROJECTION_BIAS, PROJECTION_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from tracekit.model.oproj import Projection
    from tracekit.spec import ModelSpec


def projection_tensors(projections: Mapping[int, Projection]) -> dict[str, torch.Tensor]:
    """Return output projections by layer as tensors by the names that a trace gives them.

    Layers that share a matrix get a copy each, because safetensors holds no tensor twice.
    """
    tensors: dict[str, torch.Tensor] = {}
    places: set[tuple[torch.device, int]] = set()
    for layer, projection in projections.items():
        found = {PROJECTION_WEIGHT: projection.weight, PROJECTION_BIAS: projection.bias_E}
        for name, tensor in found.items():
            if tensor is None:
                continue
            place = (tensor.device, tensor.data_ptr())
            tensors[name.format(layer)] = tensor.clone() if place in places else tensor
            places.add(place)
    return tensors


def without_projection(spec: ModelSpec, found: Collection[int]) -> str | None:
    """Return which layers have attention but no output projection in ``found``; None if none."""
    seen = [one.index for one in spec.layers if one.num_heads and one.refusal is None]
    missing = [str(layer) for layer in seen if layer not in found]
    if not missing:
        return None
    return (
        f"the output projections of layers {', '.join(missing)} are not stored: no single matrix "
        "reads their attention as it is (a gate or a norm in between, adapters, packed weights)."
    )
