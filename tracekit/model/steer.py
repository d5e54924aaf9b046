"""Attention computed by somebody else: the second use of the one hook (see ``tap``).

The model runs as it is, norms, projections, rotation and all; what its attention functions would
return comes from a ``Steering``.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from tracekit.errors import ModelError
from tracekit.model.bypass import bypasses
from tracekit.model.decoder import decoder_of, layers_by_module
from tracekit.model.override import implementations, overridden
from tracekit.model.tap import alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from tracekit.model.override import Around


class Steering(Protocol):
    """Attends in the place of a model's decoder layers."""

    def attend(
        self,
        layer: int,
        query_BHQD: torch.Tensor,
        key_BGQD: torch.Tensor,
        value_BGQD: torch.Tensor,
    ) -> torch.Tensor:
        """Return attention outputs [B, H, Q, D'] of one layer, in any floating type.

        Parameters
        ----------
        layer
            Layer number.
        query_BHQD, key_BGQD, value_BGQD
            Of the rows of the pass, after norm and rotation; those of a layer that shares another's
            keys are that one's.
        """


@contextmanager
def steered(model: Any, steering: Steering) -> Iterator[None]:
    """Let ``steering`` attend in the model's forward passes until the block ends, however it ends.

    Parameters
    ----------
    model
        A causal language model of transformers.
    steering
        Called once an attention call of the decoder.

    Raises
    ------
    UsageError
        If a tap is open already, in this thread or another.
    ModelError
        If the model attends without transformers' functions.
    """
    refuse_bypassing(model)
    with alone(), ExitStack() as stack:
        around = _ask(layers_by_module(model), steering)
        for name in implementations(model):
            stack.enter_context(overridden(name, around))
        yield


def refuse_bypassing(model: Any) -> None:
    """Raise ``ModelError`` if a model attends without transformers' functions."""
    if any(bypasses(module) for module in decoder_of(model).modules()):
        msg = (
            f"{type(model).__name__} attends by itself, not through transformers' attention "
            "functions: eviction cannot be run inside it; use --level local."
        )
        raise ModelError(msg)


def _ask(layers: dict[int, int], steering: Steering) -> Around:
    """Return what asks the steering, if a decoder layer attends; towers attend by themselves."""

    def ask(
        attend: Callable[[], Any],
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        /,
        **kwargs: Any,
    ) -> Any:
        layer = layers.get(id(module))
        if layer is None:
            return attend()
        output_BHQD = steering.attend(layer, query, key, value)
        return output_BHQD.transpose(1, 2).contiguous().to(query.dtype), None

    return ask
