"""Hidden states as they leave a decoder layer: what enters the next one, before the final norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tracekit.model.resume import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def residual_hooks(
    model: Any, residuals: Mapping[int, Callable[[torch.Tensor], None]]
) -> Iterator[Any]:
    """Register a hook on each layer that is named; yield its handle as soon as it is there.

    Parameters
    ----------
    model
        A causal language model of transformers.
    residuals
        By layer, who is told of the hidden states [B, T, E] that leave it: the model's own tensor,
        never to be changed.

    Raises
    ------
    ModelError
        If the decoder has no list of layers that say which they are.
    """
    if not residuals:
        return
    layers = decoder_layers(model)
    for number, tell in residuals.items():
        yield layers[number].register_forward_hook(_teller(tell))


def _teller(tell: Callable[[torch.Tensor], None]) -> Callable[[Any, Any, Any], None]:
    def leave(module: Any, args: Any, output: Any) -> None:
        # Some layers return a tuple: hidden states first, then weights or a router's logits.
        tell(output if torch.is_tensor(output) else output[0])

    return leave
