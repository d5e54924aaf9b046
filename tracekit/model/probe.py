"""A short forward pass, watched: what specs are read from."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import ModelError
from tracekit.model.tap import tap
from tracekit.model.versions import cache_keyword, new_cache

if TYPE_CHECKING:
    from collections.abc import Collection

    from tracekit.model.tap import AttentionCall, ForwardEnd

PROBE_TOKENS = 4
BIAS_PROBE_TOKENS = 320
"""Of models with ALiBi: from position 257 on, bfloat16 does not hold all positions."""

LONGEST_PROBE = 128
"""A probe is longer than a window only up to here: wider windows are read, not seen at work."""

_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
"""Names of a window in configs."""


class Seen:
    """Observer that keeps everything of one forward pass."""

    end: ForwardEnd

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.residuals: dict[int, torch.Tensor] = {}

    def attention(self, call: AttentionCall) -> None:
        """Keep a call."""
        self.calls.append(call)

    def forward(self, end: ForwardEnd) -> None:
        """Keep the end."""
        self.end = end

    def residual(self, layer: int, hidden_BTE: torch.Tensor) -> None:
        """Keep what leaves a layer."""
        self.residuals[layer] = hidden_BTE

    def of(self, layer: int) -> list[AttentionCall]:
        """Return the calls of one layer."""
        return [call for call in self.calls if call.layer == layer]


def probe_ids(config: Any, *, at_least: int = PROBE_TOKENS) -> torch.Tensor:
    """Return ids [1, T]: a few tokens, or enough to see a small window at work."""
    windows = (getattr(config, name, None) for name in _WINDOWS)
    small = [window for window in windows if window is not None and window < LONGEST_PROBE]
    num_tokens = max([at_least, *(window + 2 for window in small)])
    return (torch.arange(num_tokens)[None] * 7 + 5) % int(config.vocab_size)


def takes_positions(model: Any) -> bool:
    """Return whether a model can be told where its tokens stand."""
    return "position_ids" in inspect.signature(model.forward).parameters


def watch(
    model: Any, ids: torch.Tensor, *, shift: int | None = None, residuals: Collection[int] = ()
) -> Seen:
    """Run the model on ids, its positions moved if asked for, and return what was seen.

    Of the layers in ``residuals`` the hidden states that leave them are seen as well.
    """
    seen = Seen()
    inputs = {"input_ids": ids.to(model.device), cache_keyword(model): new_cache(model)}
    if shift is not None:
        positions = torch.arange(shift, shift + ids.shape[1], device=model.device)
        inputs["position_ids"] = positions[None]
    leaving = {layer: partial(seen.residual, layer) for layer in residuals}
    with torch.no_grad(), tap(model, seen, leaving):
        model(**inputs, use_cache=True)
    return seen


def check_causal(model: Any, ids: torch.Tensor, seen: Seen, *, gate: float) -> None:
    """Refuse a model whose first tokens change when later ones are taken away."""
    num_tokens = ids.shape[1] // 2
    alone = watch(model, ids[:, :num_tokens]).end.hidden_BTE
    together = seen.end.hidden_BTE[:, :num_tokens]
    error = float((alone - together).abs().max() / together.abs().max())
    if not error <= gate:
        msg = (
            f"{model.config.model_type} is no causal model: what comes later changes its first hidden "
            f"states by {error:.1e} (relative); use a decoder that reads left to right."
        )
        raise ModelError(msg)
