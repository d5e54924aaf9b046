"""Where a model is put: whole on one device, or spread over several, memory and disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from tracekit.errors import ModelError, UsageError

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that accelerate works out by itself."""


@dataclass(frozen=True)
class Placement:
    """One device, or a map of parts to places.

    Parameters
    ----------
    device
        Of the whole model; None if it is spread.
    device_map
        As transformers takes it; None if it is not spread.
    """

    device: torch.device | None
    device_map: str | dict[str, Any] | None

    @classmethod
    def of(cls, device: str, device_map: str | None) -> Placement:
        """Return what two texts ask for.

        Raises
        ------
        UsageError
            If there is no such device or map, or if both are given.
        """
        if device_map is None:
            return cls(_device(device), None)
        if device != "auto":
            msg = f"device {device} and a device map exclude each other; leave one of them out."
            raise UsageError(msg)
        return cls(None, _device_map(device_map))

    def options(self) -> dict[str, Any]:
        """Return the options of ``from_pretrained``."""
        return {} if self.device_map is None else {"device_map": self.device_map}

    def place(self, model: Any) -> Any:
        """Return the model where it is to be.

        Raises
        ------
        ModelError
            If it is spread so that nothing can be fed into it, or nothing read from its head.
        """
        if self.device is not None:
            return model.to(self.device)
        ends = {
            "input embedding": model.get_input_embeddings(),
            "head": model.get_output_embeddings(),
        }
        for name, part in ends.items():
            if part is not None and part.weight.is_meta:
                msg = f"the device map leaves the model's {name} on disk; give it a device of its own."
                raise ModelError(msg)
        return model


def _device(device: str) -> torch.device:
    """Return the device of that name, if this machine has it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        msg = f"there is no device {device!r}; use auto, cpu, cuda or cuda:N."
        raise UsageError(msg) from None
    if place.type not in ("cpu", "cuda", "mps", "xpu"):
        msg = f"nothing can be computed on device {device!r}; use auto, cpu, cuda or cuda:N."
        raise UsageError(msg)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        msg = f"this machine has {torch.cuda.device_count()} CUDA devices, so no {device}; use auto or cpu."
        raise UsageError(msg)
    return place


def _device_map(text: str) -> str | dict[str, Any]:
    """Return a strategy by name, or the places of parts, a device's number or name each."""
    if text in STRATEGIES:
        return text
    try:
        places = json.loads(text)
    except json.JSONDecodeError:
        places = None
    if not isinstance(places, dict):
        msg = (
            f"there is no device map {text!r}; use {', '.join(STRATEGIES)}, or a JSON object such as "
            '{"model": 0, "lm_head": "cpu"}.'
        )
        raise UsageError(msg)
    return places
