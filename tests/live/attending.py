"""A model's attention computed by somebody else, independently of how tracekit does it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]
    """From layer number, query, key and value [1, H or G, Q, D] to outputs [1, H, Q, D'].

    None: the model attends by itself.
    """


@contextmanager
def attending(model: Any, attend: Attend) -> Iterator[None]:
    """Let ``attend`` compute the attention of a model's layers until the block ends."""
    name = model.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS.get(name)

    def instead(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        output = attend(module.layer_idx, query, key, value)
        if output is not None:
            return output.transpose(1, 2), None
        function = own or sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
        return function(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = instead
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
