"""Torch views of recorded numpy blocks, bfloat16 included."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


def to_torch(data: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor that shares the memory of a recorded block.

    Parameters
    ----------
    data
        Numbers of a block; bfloat16 as its bits in uint16.
    dtype
        ``float32``, ``float16`` or ``bfloat16``.

    Returns
    -------
    Tensor
        Same shape; do not write into it, the memory may be a file's.
    """
    with warnings.catch_warnings():
        # Memory-mapped blocks are read-only, which torch warns about and we never break.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(data)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def to_numpy(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """Return a tensor on the CPU as the array and dtype name that ``to_torch`` reads back."""
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy(), name
