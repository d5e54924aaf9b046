"""What a scorer sees at a decision: rows up to now, and only what it declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.spec import LayerSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """The state of a stack of layers at a decision. N is 1 until the first decision was made.

    Parameters
    ----------
    layer
        The spec that the layers share, its index aside.
    layers
        Their L numbers.
    seed
        Of the sequence.
    held_NLGK
        bool: keys that are there, neither evicted nor out of the window. K tokens were seen.
    keys, attention_sum, last_attention
        What is behind the properties; None if not declared.
    """

    layer: LayerSpec
    layers: tuple[int, ...]
    seed: int
    held_NLGK: torch.Tensor
    keys: torch.Tensor | None = None
    attention_sum: torch.Tensor | None = None
    last_attention: Callable[[], torch.Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens seen, K."""
        return self.held_NLGK.shape[-1]

    @property
    def position_K(self) -> torch.Tensor:
        """Positions of the keys, int64."""
        return torch.arange(self.num_tokens, device=self.held_NLGK.device)

    @property
    def key_LGKD(self) -> torch.Tensor:
        """Keys, evicted ones included."""
        return _declared(self.keys, "keys")

    @property
    def attention_sum_NLGK(self) -> torch.Tensor:
        """Attention received from all rows so far, each as that layer computed it."""
        return _declared(self.attention_sum, "attention_sum")

    @property
    def last_attention_NLHQK(self) -> torch.Tensor:
        """Attention of the newest rows (fewer at the start), renormalised over the held keys."""
        return _declared(self.last_attention, "last_queries")()


def _declared(value: T | None, name: str) -> T:
    if value is None:
        msg = f"a scorer reads {name} without declaring it: add {name} to its needs."
        raise UsageError(msg)
    return value
