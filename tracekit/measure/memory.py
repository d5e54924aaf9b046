"""How much memory caches take and how much fits: closed forms of a model's shape, nothing measured.

Bytes of one request = bytes a number x sum over layers of min(tokens, window) x KV heads x (key +
value size); layers that share keys hold none, linear layers a state of fixed size. A kept fraction
is a share of these bytes. Weights are the caller's to subtract; activations, the allocator's pages
and what a policy must remember come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracekit.spec import ModelSpec

MOST_LAYERS = 1_000
"""Layers of the deepest model that is planned for; building as many from a config takes 12 s."""

MOST_TOKENS = 2**40
"""Tokens of the longest text that is planned for: a million million."""

_NO_END = 2**62


@dataclass(frozen=True, kw_only=True)
class CachedLayer:
    """What one layer adds to a cache.

    Parameters
    ----------
    numbers_per_token
        KV heads times the sizes of a key and a value; of a compressed cache (MLA), what it holds.
    window
        Most tokens that it holds; None without an end.
    """

    numbers_per_token: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What the cache of one request is made of.

    Parameters
    ----------
    layers
        Layers that hold keys and values of their own.
    state_bytes
        Bytes that do not grow with the tokens: states of linear layers.
    """

    layers: tuple[CachedLayer, ...]
    state_bytes: int = 0

    @classmethod
    def of(cls, spec: ModelSpec) -> CacheShape:
        """Return the shape of a recorded model's cache; a spec does not know states of linear layers."""
        held = (
            CachedLayer(numbers_per_token=layer.numbers_per_token, window=layer.window)
            for layer in spec.layers
            if layer.holds_keys
        )
        return cls(layers=tuple(held))

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int) -> CacheShape:
        """Return the shape of equal layers: 2 x layers x KV heads x head size numbers a token."""
        layer = CachedLayer(numbers_per_token=2 * num_kv_heads * head_dim)
        return cls(layers=(layer,) * num_layers)

    @property
    def numbers_per_token(self) -> int:
        """Numbers that a token adds before any window is full."""
        return sum(layer.numbers_per_token for layer in self.layers)

    def numbers(self, num_tokens: int) -> int:
        """Return the numbers held after so many tokens, however large, states not counted."""
        held = ((numbers, window) for window, numbers in self.by_window().items())
        return sum(numbers * min(num_tokens, window) for numbers, window in held)

    def numbers_T(self, tokens_T: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers held after so many tokens, int64 [T], states not counted."""
        held_T = np.zeros(len(tokens_T), dtype=np.int64)
        for window, numbers in self.by_window().items():
            held_T += numbers * np.minimum(tokens_T, window)
        return held_T

    def by_window(self) -> dict[int, int]:
        """Return the numbers a token adds to all layers of a window, the shortest window first.

        No end is a window that no text fills.
        """
        found: dict[int, int] = {}
        for layer in self.layers:
            window = _NO_END if layer.window is None else layer.window
            found[window] = found.get(window, 0) + layer.numbers_per_token
        return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The cache of a request under a kept fraction.

    Counts are exact for the decimals as written: nothing is rounded before it is compared.

    Parameters
    ----------
    cache
        What the full cache is made of.
    bytes_per_number
        2 for float16; 1 or 0.5 for quantised numbers, scales not counted.
    kept_frac
        Bytes held over the bytes of the full cache, in (0, 1].

    Raises
    ------
    UsageError
        If a number is out of range.
    """

    cache: CacheShape
    bytes_per_number: float = 2
    kept_frac: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.kept_frac <= 1:
            msg = f"a kept fraction is above 0 and at most 1, unlike {self.kept_frac:g}."
            raise UsageError(msg)
        if not 0 < self.bytes_per_number <= 8:
            msg = f"a number takes above 0 and at most 8 bytes, unlike {self.bytes_per_number:g}."
            raise UsageError(msg)

    def request_bytes(self, num_tokens: int) -> float:
        """Return the bytes of one request of so many tokens."""
        return float(self._bytes(num_tokens))

    def bytes_T(self, tokens_T: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the bytes of one request after so many tokens, float64 [T]."""
        held_T = self.cache.numbers_T(tokens_T).astype(np.float64)
        return held_T * float(self._factor) + self.cache.state_bytes

    def token_bytes(self, num_tokens: int) -> float:
        """Return the bytes that one token more adds, after so many."""
        return float(self._bytes(num_tokens + 1) - self._bytes(num_tokens))

    def requests(self, num_tokens: int, room_bytes: float) -> int | None:
        """Return how many requests fit side by side; None where they take nothing.

        Parameters
        ----------
        num_tokens
            Of each of them.
        room_bytes
            Memory beside the weights; below 0 is no room.
        """
        one = self._bytes(num_tokens)
        return None if one == 0 else max(0, math.floor(Fraction(room_bytes) / one))

    def longest(self, batch: int, room_bytes: float) -> int | None:
        """Return the most tokens that each of ``batch`` requests may have; None if without an end."""
        if batch < 1:
            msg = f"a batch has at least 1 request, unlike {batch}."
            raise UsageError(msg)
        left = Fraction(room_bytes) / batch - self.cache.state_bytes
        if left < 0:
            return 0
        # Between the ends of two windows each token adds the same, less after each of them.
        held, slope = 0, self.cache.numbers_per_token * self._factor
        for window, numbers in self.cache.by_window().items():
            more = math.floor(left / slope)
            if held + more < window or window == _NO_END:
                return held + more
            left -= (window - held) * slope
            held, slope = window, slope - numbers * self._factor
        return None

    @property
    def _factor(self) -> Fraction:
        return Fraction(repr(self.bytes_per_number)) * Fraction(repr(self.kept_frac))

    def _bytes(self, num_tokens: int) -> Fraction:
        return self.cache.numbers(num_tokens) * self._factor + self.cache.state_bytes
