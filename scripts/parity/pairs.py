"""Which policy must agree with which press of kvpress, and where the two differ by design."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Excuse = Callable[[int, np.ndarray, np.ndarray], bool]
"""Whether a difference is by design: tokens of the prompt, our keys and kvpress's of one head."""


def never(num_tokens: int, ours_K: np.ndarray, theirs_K: np.ndarray) -> bool:
    """Excuse nothing."""
    del num_tokens, ours_K, theirs_K
    return False


def broken_chunk(num_tokens: int, ours_K: np.ndarray, theirs_K: np.ndarray) -> bool:
    """Tell whether the last chunk of 256 tokens was filled up."""
    del ours_K, theirs_K
    return num_tokens % 256 > 0


def other_rounding(num_tokens: int, ours_K: np.ndarray, theirs_K: np.ndarray) -> bool:
    """Tell whether one set holds the other and at most two keys more."""
    del num_tokens
    both = (ours_K & theirs_K).sum()
    sizes = sorted((ours_K.sum(), theirs_K.sum()))
    return bool(both == sizes[0] < sizes[1] <= sizes[0] + 2)


@dataclass(frozen=True)
class Pair:
    """A policy and the press that it must agree with.

    Parameters
    ----------
    policy
        Text of the policy, the kept amount left out.
    press, settings
        Class of the press and its parameters; ``why_not`` says why there is nothing to compare.
    around
        Press that wraps it.
    is_fraction
        Whether the press counts in fractions of the prompt; the others keep a number of keys.
    attention
        Implementation that the press needs.
    reason, excuse
        A difference by design, and how to know it.
    """

    policy: str
    press: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    around: str = ""
    is_fraction: bool = False
    attention: str = "sdpa"
    reason: str = ""
    excuse: Excuse = never
    why_not: str = ""

    @property
    def name(self) -> str:
        """Name of the preset."""
        return self.policy.partition(":")[0]

    @property
    def theirs(self) -> str:
        """What kvpress calls it."""
        inner = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        text = f"{self.press}({inner})" if self.press else "-"
        return f"{self.around}({text})" if self.around else text


SNAPKV = {"window_size": 64, "kernel_size": 5}
NARROW = {"window_size": 8, "kernel_size": 5}
ROUNDING = "kvpress rounds each layer by itself, tracekit so that the bytes are exact"

PAIRS = (
    Pair("snapkv:window=64,kernel=5,at=prompt", "SnapKVPress", SNAPKV),
    Pair("snapkv:window=8,kernel=7,at=prompt", "SnapKVPress", {"window_size": 8, "kernel_size": 7}),
    Pair("knorm:at=prompt", "KnormPress"),
    Pair("keydiff:at=prompt", "KeyDiffPress"),
    Pair("tova:recent=1,at=prompt", "TOVAPress"),
    Pair("lagkv:lag=128,sinks=4,at=prompt", "LagKVPress", {"n_sink": 4, "lag_size": 128}),
    Pair("lagkv:lag=32,sinks=4,at=prompt", "LagKVPress", {"n_sink": 4, "lag_size": 32}),
    Pair("streaming:sinks=4,at=prompt", "StreamingLLMPress", {"n_sink": 4}),
    Pair(
        "expected:future=512,sinks=4,at=prompt",
        "ExpectedAttentionPress",
        {"n_future_positions": 512, "n_sink": 4},
    ),
    Pair("cur:window=16,sinks=4,at=prompt", "CURPress", {"num_sinks": 4, "local_window_size": 16}),
    Pair("observed:at=prompt", "ObservedAttentionPress", attention="eager"),
    Pair(
        "pyramidkv:window=64,kernel=5,beta=20,pyramid_window=64,at=prompt",
        "PyramidKVPress",
        SNAPKV | {"beta": 20},
        is_fraction=True,
        reason=ROUNDING,
        excuse=other_rounding,
    ),
    Pair(
        "pyramidkv:window=8,kernel=5,beta=20,pyramid_window=8,at=prompt",
        "PyramidKVPress",
        NARROW | {"beta": 20},
        is_fraction=True,
        reason=ROUNDING,
        excuse=other_rounding,
    ),
    Pair(
        "adakv:window=64,kernel=5,safeguard=0.2,at=prompt",
        "SnapKVPress",
        SNAPKV,
        around="AdaKVPress",
    ),
    Pair(
        "adakv:window=8,kernel=5,safeguard=0.2,at=prompt",
        "SnapKVPress",
        NARROW,
        around="AdaKVPress",
    ),
    Pair(
        "noncausal:chunk=256,at=prompt",
        "NonCausalAttnPress",
        {"chunk_size": 256},
        reason="keys that pad kvpress's last chunk take part in its softmax (-1e-9 for -1e9)",
        excuse=broken_chunk,
    ),
    Pair("leverage", why_not="kvpress multiplies by a random matrix and takes no seed"),
    Pair("random", why_not="drawn by other generators"),
    Pair("rkv", why_not="kvpress 0.5.5 has no such press"),
)
