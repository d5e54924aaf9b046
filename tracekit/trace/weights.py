"""``weights.safetensors`` of a trace, read tensor by tensor and without torch.

The file is 8 bytes with the length of a JSON header, the header (type, shape and place of each
tensor), and the numbers. Numpy has no bfloat16, so that safetensors' own reader would refuse it.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.errors import TraceError
from tracekit.trace import layout

if TYPE_CHECKING:
    from tracekit.trace.folder import Folder

PROJECTION_WEIGHT, PROJECTION_BIAS = "oproj.{}.weight", "oproj.{}.bias"
"""Names of a layer's output projection."""

_TYPES = {
    "F64": ("float64", np.float64),
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", np.uint16),
}
"""By safetensors' name: ours, and what numpy reads."""

_LENGTH_BYTES = 8


class Weights:
    """The stored weights of a trace; nothing is read before it is asked for.

    Parameters
    ----------
    folder
        Of the trace.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._path = folder.path / layout.WEIGHTS

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the tensors; none if no weights were stored.

        Raises
        ------
        TraceError
            If the file is damaged.
        """
        return frozenset(self._header) - {"__metadata__"}

    def read(self, name: str) -> tuple[np.ndarray, str]:
        """Return a tensor, bfloat16 as its bits in uint16, and its type.

        Parameters
        ----------
        name
            One of ``names``.

        Raises
        ------
        TraceError
            If the file is damaged.
        """
        entry = self._header[name]
        dtype, kind = _TYPES[entry["dtype"]]
        start, end = entry["data_offsets"]
        data = self._bytes(self._numbers_at + start, end - start)
        return np.frombuffer(data, kind).reshape(entry["shape"]), dtype

    @cached_property
    def _header(self) -> dict[str, Any]:
        if not self._folder.exists(self._path):
            return {}
        try:
            header: dict[str, Any] = json.loads(self._bytes(_LENGTH_BYTES, self._header_bytes))
        except ValueError as error:
            msg = f"{self._path} is damaged: its header is no JSON; tracekit validate tells more."
            raise TraceError(msg) from error
        return header

    @cached_property
    def _header_bytes(self) -> int:
        return int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")

    @property
    def _numbers_at(self) -> int:
        return _LENGTH_BYTES + self._header_bytes

    def _bytes(self, start: int, count: int) -> bytes:
        """Return so many bytes of the file: no more is read, also where it is remote."""
        with self._folder.explained(self._path), self._path.open("rb") as file:
            size = file.seek(0, 2)
            # A damaged length may be anything; it must not be asked of memory.
            if start + count <= size:
                file.seek(start)
                return bytes(file.read(count))
        msg = f"{self._path} ends after {size} bytes; tracekit validate tells what is damaged."
        raise TraceError(msg)
