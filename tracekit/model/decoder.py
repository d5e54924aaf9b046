"""The text decoder of a model, and which of its modules belongs to which layer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def decoder_of(model: Any) -> Any:
    """Return the text decoder; towers for images or sound share its attention functions."""
    decoder = model.get_decoder()
    if decoder is not model:
        return decoder
    # Llama 4's text model names itself; its decoder is the one model inside.
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inner[0] if len(inner) == 1 else model


def layer_number(module: Any) -> int | None:
    """Return the number of the layer that a module says it belongs to, None if it says none."""
    number: int | None = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    return number


def layers_by_module(model: Any) -> dict[int, int]:
    """Return the layer number of each module of the decoder that has one, by the module's id."""
    numbers = ((id(m), layer_number(m)) for m in decoder_of(model).modules())
    return {module: number for module, number in numbers if number is not None}
