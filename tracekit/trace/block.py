"""A recorded tensor as numpy holds it, bfloat16 included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Types of arrays by the names of what they hold."""

BFLOAT16_EXPONENT = 0x7F80
"""Bits of bfloat16 that are all set in NaN and infinity."""


@dataclass(frozen=True)
class Block:
    """A recorded tensor of one sequence.

    Parameters
    ----------
    data
        The numbers: hidden states [T, E]; queries [H, T, D]; keys and values [G, T, D]; influence
        [P, H, R, D'].
        bfloat16 comes as its bits in uint16 (numpy has no such type).
    dtype
        ``float32``, ``float16`` or ``bfloat16``; ``measure.tensors.to_torch`` reads both fields.
    """

    data: np.ndarray
    dtype: str

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        if self.dtype == "bfloat16":
            return not bool(((self.data & BFLOAT16_EXPONENT) == BFLOAT16_EXPONENT).any())
        return bool(np.isfinite(self.data).all())
