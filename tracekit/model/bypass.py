"""Attention that does not go through transformers' table of functions, seen by what it computes.

Falcon, BLOOM, MPT, GPT-Neo and others attend by themselves. Inside their attention modules, and
nowhere else, products and the softmax between them are watched: the product before it is of queries
and keys, the one after it of weights and values.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tracekit.model.decoder import layer_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PRODUCTS = frozenset(
    {
        torch.matmul,
        torch.bmm,
        torch.baddbmm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.bmm,
        torch.Tensor.baddbmm,
    }
)
"""Functions that multiply batches of matrices; the factors are their last two tensors."""

_SOFTMAXES = frozenset({functional.softmax, torch.softmax, torch.Tensor.softmax})


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What one attention computed, in the words of ``AttentionCall``.

    Parameters
    ----------
    query_BHQD, key_BGKD, value_BGKD, output_BQHD
        Queries, keys, values and outputs.
    mask, scale
        What a fused kernel was given; of others the visible keys [B, H, Q, K], and None.
    window
        Tokens that a query may see, or None.
    logits_BHQK
        What entered the softmax, bias and mask included; None of a fused kernel.
    """

    query_BHQD: torch.Tensor
    key_BGKD: torch.Tensor
    value_BGKD: torch.Tensor
    output_BQHD: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    window: int | None
    logits_BHQK: torch.Tensor | None


def bypassing_hooks(decoder: Any, told: Callable[[int, Attended], None]) -> Iterator[Any]:
    """Watch the attention modules of a decoder that attend by themselves.

    Parameters
    ----------
    decoder
        The text decoder.
    told
        Called with the layer number and what was computed, once an attention.

    Yields
    ------
    Any
        The handle of each hook as soon as it is there to be removed.
    """
    for module in decoder.modules():
        if bypasses(module):
            watch = _ModuleWatch(layer_number(module), told)
            yield module.register_forward_pre_hook(watch.enter, with_kwargs=True)
            # Always: what is watched ends with the module, also where it raises.
            yield module.register_forward_hook(watch.leave, always_call=True)


def bypasses(module: Any) -> bool:
    """Return whether a module is an attention whose file does not know the table of functions."""
    # By the name: mixers of recurrent layers have numbers too, and would pay for being watched.
    if layer_number(module) is None or "attention" not in type(module).__name__.lower():
        return False
    if any(layer_number(inner) is not None for inner in module.modules() if inner is not module):
        return False  # a wrapper: the attention is inside
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)


class _ModuleWatch:
    """Hooks of one module: a mode that sees functions of tensors is on while the module runs."""

    def __init__(self, layer: int | None, told: Callable[[int, Attended], None]) -> None:
        self._layer = layer
        self._told = told
        self._modes: list[_Products] = []

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = next(len(one) for one in (*args, *kwargs.values()) if torch.is_tensor(one))
        mode = _Products(batch, _window(module))
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)

    def leave(self, module: Any, args: Any, output: Any) -> None:
        if not self._modes:
            return  # the module raised before it was entered
        mode = self._modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and self._layer is not None:
            for attended in mode.attended:
                self._told(self._layer, attended)


class _Products(TorchFunctionMode):
    """Sees the products around each softmax, or the fused kernel that holds all of it."""

    def __init__(self, batch: int, window: int | None) -> None:
        super().__init__()
        self.attended: list[Attended] = []
        self._batch = batch
        self._window = window
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        self._product_size = 0
        self._logits: torch.Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if function in _PRODUCTS:
            tensors = [one for one in (*args, *kwargs.values()) if torch.is_tensor(one)]
            self._see_product(tensors[-2], tensors[-1], output)
        elif function in _SOFTMAXES:
            logits = args[0] if args else kwargs["input"]
            self._logits = logits if logits.numel() == self._product_size else None
        elif function is functional.scaled_dot_product_attention:
            self._see_fused(output, *args, **kwargs)
        return output

    def _see_product(self, left: torch.Tensor, right: torch.Tensor, output: torch.Tensor) -> None:
        logits, factors = self._logits, self._factors
        if right.ndim < 3:
            return  # a linear layer
        if logits is None or factors is None or left.numel() != logits.numel():
            self._factors, self._product_size, self._logits = (left, right), output.numel(), None
            return
        value, logits = self._by_head(right), self._by_head(logits)
        self._factors = self._logits = None
        self.attended.append(
            Attended(
                # Those that were widened for the softmax are given as the cache holds them.
                query_BHQD=self._by_head(factors[0]).to(value.dtype),
                key_BGKD=self._by_head(factors[1].transpose(-1, -2)).to(value.dtype),
                value_BGKD=value,
                output_BQHD=self._by_head(output).transpose(1, 2),
                # Hidden keys carry the smallest number of the model's type, or less.
                mask=logits > torch.finfo(value.dtype).min / 2,
                scale=None,
                window=self._window,
                logits_BHQK=logits,
            )
        )

    def _see_fused(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.attended.append(
            Attended(
                query_BHQD=query,
                key_BGKD=key,
                value_BGKD=value,
                output_BQHD=output.transpose(1, 2),
                mask=attn_mask,
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                window=self._window,
                logits_BHQK=None,
            )
        )

    def _by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with an axis of heads; BLOOM joins it with that of the batch."""
        return tensor.reshape(self._batch, -1, *tensor.shape[-2:])


def _window(module: Any) -> int | None:
    """Return the window of GPT-Neo's local layers: it is in no argument, only in a mask."""
    if getattr(module, "attention_type", None) != "local":
        return None
    return int(module.config.window_size)
