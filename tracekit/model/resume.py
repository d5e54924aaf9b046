"""Forward passes that begin at a layer: what the layers below gave is known and not computed again.

A layer is entered with hidden states that an earlier pass was seen to bring; the layers below it
hand on what they get. A single layer can be called again with all else that the model gave it.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import ModuleList

from tracekit.errors import ModelError
from tracekit.model.decoder import decoder_of, layer_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch


def decoder_layers(model: Any) -> list[Any]:
    """Return the layers of a model's decoder, in order.

    Raises
    ------
    ModelError
        If the decoder has no list of layers that say which they are.
    """
    decoder = decoder_of(model)
    for module in decoder.modules():
        if type(module) is ModuleList and len(module) and _are_layers(list(module)):
            return list(module)
    msg = f"the layers of {type(decoder).__name__} are in no list; use another model."
    raise ModelError(msg)


def _are_layers(modules: list[Any]) -> bool:
    """Return whether module number i holds parts of layer i, and of no other."""
    numbers = [{layer_number(part) for part in module.modules()} - {None} for module in modules]
    return numbers == [{number} for number in range(len(modules))]


@contextmanager
def watched_layers(model: Any, seen: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Tell of the hidden states that enter each layer of a model, until the block ends."""

    def watch(number: int) -> Callable[..., None]:
        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen(number, _hidden(args, kwargs))

        return enter

    with ExitStack() as stack:
        for number, layer in enumerate(decoder_layers(model)):
            handle = layer.register_forward_pre_hook(watch(number), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def entered_at(model: Any, layer: int, hidden: torch.Tensor) -> Iterator[None]:
    """Let forward passes begin at a layer, until the block ends, however it ends.

    Parameters
    ----------
    model
        A causal language model of transformers.
    layer
        Number of the layer; 0 skips none.
    hidden
        What enters it, of the shape of the model's hidden states.
    """
    layers = decoder_layers(model)

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_hidden(hidden, args, kwargs)

    with ExitStack() as stack:
        for below in layers[:layer]:
            stack.enter_context(_handing_on(below))
        handle = layers[layer].register_forward_pre_hook(enter, with_kwargs=True)
        stack.callback(handle.remove)
        yield


@contextmanager
def left_with(model: Any, hidden: torch.Tensor) -> Iterator[None]:
    """Let forward passes begin after the last layer, until the block ends, however it ends.

    Parameters
    ----------
    model
        A causal language model of transformers.
    hidden
        What the last layer returns, of the shape of the model's hidden states.
    """
    *below, last = decoder_layers(model)
    with ExitStack() as stack:
        for layer in below:
            stack.enter_context(_handing_on(layer))
        stack.enter_context(_instead(last, lambda *_, **__: hidden))
        yield


@dataclass(frozen=True, eq=False)
class LayerCall:
    """How a forward pass calls one layer: mask, rotation and whatever else its model hands it."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def output(self, hidden: torch.Tensor) -> Any:
        """Return what the layer makes of other hidden states, called in the same way."""
        args, kwargs = _with_hidden(hidden, self.args, self.kwargs)
        return self.layer(*args, **kwargs)


def layer_calls(model: Any, run: Callable[[], object]) -> list[LayerCall]:
    """Return how each layer is called in a forward pass, in order; none of them is run.

    Parameters
    ----------
    model
        A causal language model of transformers.
    run
        Runs one forward pass of its decoder.
    """
    calls: list[LayerCall] = []

    def caught(layer: Any) -> Callable[..., Any]:
        def catch(*args: Any, **kwargs: Any) -> Any:
            calls.append(LayerCall(layer, args, kwargs))
            return _hidden(args, kwargs)

        return catch

    with ExitStack() as stack:
        for layer in decoder_layers(model):
            stack.enter_context(_instead(layer, caught(layer)))
        run()
    return calls


@contextmanager
def _instead(layer: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of a layer's own."""
    # Models that are spread over devices have one there already, which moves tensors.
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def _handing_on(layer: Any) -> AbstractContextManager[None]:
    """Let a layer return the hidden states that it gets."""
    return _instead(layer, lambda *args, **kwargs: _hidden(args, kwargs))


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _with_hidden(
    hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}
