"""From the device to memory without waiting: a stream beside the model's, and pinned memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tracekit.measure.tensors import to_numpy

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np


@dataclass(frozen=True)
class Arrival:
    """Tensors on their way to memory.

    Parameters
    ----------
    tensors
        By name, in memory; not yet filled while an event is open.
    events
        One a device: happened when its tensors are there.
    """

    tensors: Mapping[str, torch.Tensor]
    events: tuple[Any, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def arrays(self) -> dict[str, tuple[np.ndarray, str]]:
        """Wait, and return arrays with the names of their types (see ``measure.tensors``)."""
        for event in self.events:
            event.synchronize()
        return {name: to_numpy(tensor) for name, tensor in self.tensors.items()}


class Transfer:
    """Copies tensors to memory; from a GPU on a side stream, so that the model goes on meanwhile."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> Arrival:
        """Return tensors on their way; they may be freed as soon as this returns.

        Parameters
        ----------
        tensors
            By name, on any devices. What is contiguous is not packed first, so it must not be
            changed any more; views are, and the buffers behind them are free again.
        """
        here: dict[str, torch.Tensor] = {}
        events = []
        devices = {tensor.device for tensor in tensors.values()}
        for device in devices:
            group = {name: t for name, t in tensors.items() if t.device == device}
            if device.type != "cuda":
                here |= {name: t.detach().cpu().contiguous() for name, t in group.items()}
                continue
            copied, event = self._from_cuda(group, device)
            here |= copied
            events.append(event)
        return Arrival({name: here[name] for name in tensors}, tuple(events))

    def _from_cuda(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> tuple[dict[str, torch.Tensor], Any]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        # Views are packed on the model's stream: the buffers behind them are written over next.
        packed = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        stream.wait_stream(torch.cuda.current_stream(device))
        copied = {}
        with torch.cuda.stream(stream):
            for name, tensor in packed.items():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copied[name] = pinned.copy_(tensor, non_blocking=True)
                # The allocator must not give the memory away before the copy has read it.
                tensor.record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        return copied, event
