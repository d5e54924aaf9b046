"""The one hook: every attention call and every forward pass of a model, seen while it runs.

What an attention function is given is what attention is made of: queries and keys after rotation,
the whole cache, the mask.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tracekit.errors import ModelError, UsageError
from tracekit.model.bypass import bypassing_hooks
from tracekit.model.decoder import decoder_of, layers_by_module
from tracekit.model.override import implementations, overridden
from tracekit.model.residuals import residual_hooks
from tracekit.model.versions import cache_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tracekit.model.bypass import Attended
    from tracekit.model.override import Around

_OPEN = threading.Lock()
"""Held while a tap is open: the table of attention functions is shared by the whole process."""

_EXTRAS = ("position_bias", "indices", "block_indices")
"""Arguments that change attention beyond mask, scale, soft-cap and sinks."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of a layer's attention function; tensors are the model's own, never to be changed.

    Parameters
    ----------
    layer
        Layer number.
    query_BHQD
        Queries [B, H, Q, D] of the new tokens, after norm and rotation.
    key_BGKD, value_BGKD
        Keys [B, G, K, D] and values [B, G, K, D'], cached ones first; the last Q are new. A cache
        of fixed size has unused columns after them.
    mask
        As given: None (causal), bool [B, 1, Q, K] with True for visible keys (sdpa), float with
        large negative numbers for hidden ones (eager), bool [B, K] (flash), or a block mask (flex).
    scale
        Factor on the product of query and key; None where it must be found from the logits.
    softcap
        Soft-cap of the logits, or None.
    window
        Tokens a query may see, its own included, or None.
    sinks_H
        Sink logits [H], or None.
    output_BQHD
        What the function returned, [B, Q, H, D'].
    extras
        Names of further arguments that change attention (sparse selections, position biases).
    logits_BHQK
        What entered the softmax, where the layer attends without transformers' functions and
        without a fused kernel; else None.
    """

    layer: int
    query_BHQD: torch.Tensor
    key_BGKD: torch.Tensor
    value_BGKD: torch.Tensor
    mask: Any | None
    scale: float | None
    softcap: float | None
    window: int | None
    sinks_H: torch.Tensor | None
    output_BQHD: torch.Tensor
    extras: tuple[str, ...] = ()
    logits_BHQK: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ForwardEnd:
    """What one forward pass of the whole model left.

    Parameters
    ----------
    hidden_BTE
        Input of the language-model head [B, T, E] at all positions of the pass, also where the
        head itself scored the last one only.
    logits_BTV
        Logits as the model returned them, at the positions that it scored.
    cache
        The cache after the pass, or None.
    """

    hidden_BTE: torch.Tensor
    logits_BTV: torch.Tensor
    cache: Any | None


class Observer(Protocol):
    """Who wants to see; both methods run inside the forward pass and must not change anything."""

    def attention(self, call: AttentionCall) -> None:
        """See one attention call of one layer."""

    def forward(self, end: ForwardEnd) -> None:
        """See the end of one forward pass of the whole model."""


@contextmanager
def tap(
    model: Any,
    observer: Observer,
    residuals: Mapping[int, Callable[[torch.Tensor], None]] | None = None,
) -> Iterator[None]:
    """Let ``observer`` see the model's forward passes until the block ends, however it ends.

    Parameters
    ----------
    model
        A causal language model of transformers.
    observer
        Called once an attention call of the decoder and once a forward pass.
    residuals
        By layer, who is told of the hidden states [B, T, E] that leave it.

    Raises
    ------
    UsageError
        If a tap is open already, in this thread or another.
    ModelError
        If there is no telling which modules are the layers; from the model's forward pass: its head
        reads something else than its decoder returns.
    """
    with alone(), ExitStack() as stack:
        around = _tell_attention(layers_by_module(model), observer)
        for name in implementations(model):
            stack.enter_context(overridden(name, around))
        for handle in bypassing_hooks(decoder_of(model), _tell_bypassing(observer)):
            stack.callback(handle.remove)
        for handle in residual_hooks(model, residuals or {}):
            stack.callback(handle.remove)
        for handle in _PassHooks(observer).install(model):
            stack.callback(handle.remove)
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Hold the table of attention functions until the block ends.

    Raises
    ------
    UsageError
        If somebody holds it already, in this thread or another.
    """
    if not _OPEN.acquire(blocking=False):
        msg = "a tap is open already; close it before the next one is opened."
        raise UsageError(msg)
    try:
        yield
    finally:
        _OPEN.release()


def _tell_attention(layers: dict[int, int], observer: Observer) -> Around:
    """Return what calls an attention function and then tells of it, if a decoder layer asked."""

    def tell(
        attend: Callable[[], Any],
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        /,
        **kwargs: Any,
    ) -> Any:
        output = attend()
        layer = layers.get(id(module))
        if layer is None:
            return output
        scale = kwargs.get("scaling")
        observer.attention(
            AttentionCall(
                layer=layer,
                query_BHQD=query,
                key_BGKD=key,
                value_BGKD=value,
                mask=mask,
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                softcap=kwargs.get("softcap"),
                window=kwargs.get("sliding_window"),
                sinks_H=kwargs.get("s_aux"),
                output_BQHD=output[0],
                extras=tuple(name for name in _EXTRAS if kwargs.get(name) is not None),
            )
        )
        return output

    return tell


def _tell_bypassing(observer: Observer) -> Callable[[int, Attended], None]:
    """Return what is done after each attention that goes around those functions."""

    def tell(layer: int, seen: Attended) -> None:
        call = AttentionCall(layer=layer, softcap=None, sinks_H=None, **vars(seen))
        observer.attention(call)

    return tell


class _PassHooks:
    """Hooks that put together what one forward pass leaves."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._decoded: torch.Tensor | None = None
        self._scored: torch.Tensor | None = None

    def install(self, model: Any) -> Iterator[Any]:
        """Register the hooks; yield the handle of each as soon as it is there to be removed."""
        head = model.get_output_embeddings()
        if head is None:
            msg = (
                f"{type(model).__name__} has no language-model head; load a causal language model."
            )
            raise ModelError(msg)
        yield decoder_of(model).register_forward_hook(self._keep_decoded)
        yield head.register_forward_pre_hook(self._keep_scored)
        yield model.register_forward_hook(self._tell)

    def _keep_decoded(self, module: Any, args: Any, output: Any) -> None:
        self._decoded = output[0]

    def _keep_scored(self, module: Any, args: Any) -> None:
        self._scored = args[0]

    def _tell(self, module: Any, args: Any, output: Any) -> None:
        decoded, scored = self._decoded, self._scored
        # Let go of the tensors: the next pass must not be joined with rows of this one.
        self._decoded = self._scored = None
        if decoded is None or scored is None:
            msg = f"{type(module).__name__} does not call its own decoder and head; use another model."
            raise ModelError(msg)
        hidden = _head_input(decoded, scored)
        end = ForwardEnd(hidden_BTE=hidden, logits_BTV=output.logits, cache=cache_of(output))
        self._observer.forward(end)


def _head_input(decoded: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Return the head's input at all positions, given the decoder's output and what the head saw."""
    if scored.shape[1] == decoded.shape[1]:
        return scored
    last = decoded[:, -scored.shape[1] :]
    is_view = last.data_ptr() == scored.data_ptr() and last.stride() == scored.stride()
    # The usual slice is seen from its address; only what was copied on the way is compared.
    if is_view or torch.equal(last, scored):
        return decoded
    msg = (
        "the head reads something else than the decoder's last hidden states, so logits cannot be "
        "derived from them; this model cannot be recorded."
    )
    raise ModelError(msg)
