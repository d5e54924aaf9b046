"""Keys and values as floating-point numbers of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from tracekit.errors import UsageError
from tracekit.kv.transform import TRANSFORMS, Entries, Transform

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec


@TRANSFORMS.register("fp8")
@final
@dataclass(frozen=True)
class Float8(Transform):
    """Numbers rounded to 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa), no scales.

    Micikevicius et al. 2022, arXiv:2209.05433, section 3: what serving engines call an fp8 cache
    at scale 1. Numbers beyond 448 are taken to it.

    Parameters
    ----------
    residual
        Newest entries that stay as they were written.
    """

    residual: int = 0

    def __post_init__(self) -> None:
        if self.residual < 0:
            msg = f"residual={self.residual} is a number of entries, not negative."
            raise UsageError(msg)

    def store(self, entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nearest 8-bit floats, ties to even."""
        return _rounded(entries.key_XCD), _rounded(entries.value_XCD)

    def entry_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return one byte a number."""
        del bytes_per_number
        return layer.head_dim + layer.value_dim


def _rounded(x: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).float().to(torch.float8_e4m3fn).to(x)
