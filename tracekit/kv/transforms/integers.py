"""Keys and values as integers of a few bits, with a scale and a zero point for each group."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

import torch

from tracekit.errors import UsageError
from tracekit.kv.transform import TRANSFORMS, Entries, Transform

if TYPE_CHECKING:
    from tracekit.spec import LayerSpec

Along = Literal["channel", "token"]
"""What a group lies in: one channel of many tokens, or one token's many channels."""

_PARAMETER_BYTES = 4
"""A scale and a zero point, float16 each."""


@dataclass(frozen=True)
class Integers(Transform):
    """Asymmetric uniform quantisation: x = zero + scale * code, codes of a fixed number of bits.

    By default as KIVI (Liu et al. 2024, arXiv:2402.02750, sections 3.2 and 4.1): keys per channel,
    in groups of consecutive tokens of the cache, values per token, in groups of channels, the
    newest entries as they are. zero = min and scale = (max - min) / (2^bits - 1) of a group, both
    rounded to float16, as the cache holds them; numbers beyond float16's range are taken to its
    ends, and a group whose numbers are all alike comes back as its zero point.

    Differences: KIVI empties the keys' whole residual window at once and lets values leave it one
    by one; here keys and values close together, a group at a time, and ``residual`` entries stay
    open at all times. Its groups must divide the head; here the last one may be shorter. Bytes
    are those of whole groups: entries that are evicted later leave their group's scale behind,
    which is not counted.

    Parameters
    ----------
    key, value
        ``channel``: each channel of ``group`` tokens has a scale; ``token``: ``group`` channels of
        each token have one.
    group
        Numbers that share a scale.
    residual
        Newest entries that stay as they were written.
    """

    key: Along = "channel"
    value: Along = "token"
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        if self.group < 1 or self.residual < 0:
            msg = (
                f"group={self.group} must be at least 1 and residual={self.residual} not negative."
            )
            raise UsageError(msg)

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def num_together(self) -> int:
        """A group of tokens where one shares scales."""
        return self.group if "channel" in (self.key, self.value) else 1

    def store(self, entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zero + scale * code."""
        return self._rounded(entries.key_XCD, self.key), self._rounded(
            entries.value_XCD, self.value
        )

    def entry_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return packed codes, and the entry's part of the scales and zero points."""
        del bytes_per_number
        return self._bytes(layer.head_dim, self.key) + self._bytes(layer.value_dim, self.value)

    def _bytes(self, size: int, along: Along) -> float:
        scales = size / self.group if along == "channel" else math.ceil(size / self.group)
        return size * self.bits / 8 + _PARAMETER_BYTES * scales

    def _rounded(self, x_XCD: torch.Tensor, along: Along) -> torch.Tensor:
        if along == "channel":
            grouped = x_XCD.unflatten(1, (-1, self.group))
            return _read_back(grouped, 2, self.bits).flatten(1, 2)
        parts = [_read_back(part, -1, self.bits) for part in x_XCD.split(self.group, dim=-1)]
        return torch.cat(parts, dim=-1)


def _read_back(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Return numbers as they come back of codes that share a scale along an axis."""
    ends, most = torch.finfo(torch.float16), 2**bits - 1
    low = x.amin(dim, keepdim=True).clamp(ends.min, ends.max)
    high = x.amax(dim, keepdim=True).clamp(ends.min, ends.max)
    zero, scale = _as_half(low), _as_half((high - low) / most)
    code = ((x - zero) / scale.where(scale > 0, 1)).round().clamp(0, most)
    return zero + scale * code


def _as_half(x: torch.Tensor) -> torch.Tensor:
    return x.float().half().to(x)


@TRANSFORMS.register("int8")
@final
@dataclass(frozen=True)
class Int8(Integers):
    """Codes of 8 bits with a scale and a zero point for each group; newest entries as they are."""

    @property
    def bits(self) -> int:
        """8."""
        return 8


@TRANSFORMS.register("int4")
@final
@dataclass(frozen=True)
class Int4(Integers):
    """Codes of 4 bits with a scale and a zero point for each group; newest entries as they are."""

    @property
    def bits(self) -> int:
        """4."""
        return 4


@TRANSFORMS.register("int2")
@final
@dataclass(frozen=True)
class Int2(Integers):
    """Codes of 2 bits with a scale and a zero point for each group; newest entries as they are."""

    @property
    def bits(self) -> int:
        """2."""
        return 2
