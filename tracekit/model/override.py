"""An attention function of transformers, replaced under its own name by one that stands around it.

A new name would lose masks and sinks in models whose code branches on it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tracekit.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Around(Protocol):
    """What is done in place of an attention function, of whatever model."""

    def __call__(
        self,
        attend: Callable[[], Any],
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        /,
        **kwargs: Any,
    ) -> Any:
        """Return what the function would: the output [B, Q, H, D], then weights or None.

        Calling ``attend`` calls the function itself.
        """


def implementations(model: Any) -> set[str]:
    """Return the names of the attention functions that the parts of a model use."""
    configs = (getattr(module, "config", None) for module in model.modules())
    names: set[Any] = {getattr(config, "_attn_implementation", None) for config in configs}
    return {name for name in names if name == "eager" or name in ALL_ATTENTION_FUNCTIONS}


@contextmanager
def overridden(name: str, around: Around) -> Iterator[None]:
    """Put ``around`` under the name of an attention function."""
    table = ALL_ATTENTION_FUNCTIONS
    original = table.get(name)
    # An override that someone else has put here is called, kept, and put back.
    before = table._local_mapping.get(name)

    def instead(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        function = original or _eager_function(module)
        attend = partial(function, module, query, key, value, attention_mask, *args, **kwargs)
        return around(attend, module, query, key, value, attention_mask, **kwargs)

    table[name] = instead
    try:
        yield
    finally:
        if before is None:
            del table[name]
        else:
            table[name] = before


def _eager_function(module: Any) -> Callable[..., Any]:
    """Return the eager attention of the file that defines the module: it has no entry of its own."""
    for cls in type(module).__mro__:
        file = sys.modules.get(cls.__module__)
        found: Callable[..., Any] | None = getattr(file, "eager_attention_forward", None)
        if found is not None:
            return found
    msg = (
        f"the eager attention of {type(module).__name__} was not found; use another implementation."
    )
    raise ModelError(msg)
