"""What a cache entry becomes when it is stored: codes of fewer bits, or coefficients of a basis.

Attention reads what comes back of an entry. Entries close in cache order, ``num_together`` at a
time, once so many more than the residual window are open; a closed entry keeps its value for good,
and rows before its closing have seen it as it was written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tracekit.registry import Registry

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View
    from tracekit.spec import LayerSpec, RopeSpec

Fitted = tuple["torch.Tensor", ...]
"""What a transform learned at the first decision, each tensor [X, ...], X = layers times KV heads."""


class Entries(NamedTuple):
    """C entries that close now in each of X heads, in cache order.

    Parameters
    ----------
    key_XCD, value_XCD
        Keys at their place in the text, and values, as written: float32 or float64.
    position_XC
        Positions in the text, int64.
    fitted
        What ``Transform.fit`` gave for these heads.
    rope
        What turned the keys; None if nothing did.
    """

    key_XCD: torch.Tensor
    value_XCD: torch.Tensor
    position_XC: torch.Tensor
    fitted: Fitted = ()
    rope: RopeSpec | None = None


@dataclass(frozen=True)
class Transform(ABC):
    """Stores entries in fewer bytes, with a loss. Parameters are dataclass fields."""

    @property
    def num_together(self) -> int:
        """Entries that close together."""
        return 1

    @property
    def residual(self) -> int:
        """Newest entries that stay as they were written."""
        return 0

    def fit(self, view: View) -> Fitted:
        """Return what is learned from the rows before the first decision.

        Parameters
        ----------
        view
            Keys and values so far, held or not; N = 1.
        """
        del view
        return ()

    @abstractmethod
    def store(self, entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [X, C, D] as they are read back.

        Parameters
        ----------
        entries
            Of which C is a multiple of ``num_together``.
        """

    @abstractmethod
    def entry_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes of a closed entry of one KV head: codes, scales and zero points."""

    def fixed_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes that a KV head keeps whatever its length, such as a basis."""
        del layer, bytes_per_number
        return 0.0


TRANSFORMS: Registry[Transform] = Registry(
    "transform", package="tracekit.kv.transforms", group="tracekit.transforms"
)
