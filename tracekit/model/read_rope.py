"""Rotary embeddings: frequencies from the model's buffers, and which layer uses which, as seen."""

from __future__ import annotations

from typing import Any

import torch

from tracekit.model.decoder import decoder_of
from tracekit.spec import RopeSpec

SHIFT = 11
"""Positions by which a probe is moved to see which keys turn."""

_BUFFER = "inv_freq"


def read_ropes(model: Any) -> dict[str, RopeSpec]:
    """Return the rotary embeddings of the decoder by name, from what its modules hold.

    The name is ``default``, or the kind of layer that it belongs to (``sliding_attention``).
    Modules without ``config.rope_parameters`` are not rotary embeddings of text and are left out.
    """
    ropes: dict[str, RopeSpec] = {}
    for module in decoder_of(model).modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
        for buffer, inv_freq in module.named_buffers(recurse=False):
            if not buffer.endswith(_BUFFER) or "original" in buffer or parameters is None:
                continue
            name = buffer.removesuffix(_BUFFER).removesuffix("_")
            settings = parameters.get(name, parameters) or {}
            scaling = getattr(module, f"{buffer.removesuffix(_BUFFER)}attention_scaling", 1.0)
            ropes[name or "default"] = RopeSpec(
                kind=settings.get("rope_type", "default"),
                theta=float(settings["rope_theta"]),
                inv_freq=tuple(inv_freq.double().tolist()),
                attention_scaling=float(scaling),
            )
    return ropes


def rope_of(
    key_GKD: torch.Tensor, moved_GKD: torch.Tensor, ropes: dict[str, RopeSpec], *, gate: float
) -> str | None:
    """Return the name of the rotary embedding that turned a layer's keys, None if none did.

    Attention does not see a common shift of all positions, so hidden states stay the same and keys
    differ by their rotation alone. This holds whether the config names such layers or not.

    Parameters
    ----------
    key_GKD
        Keys of a probe.
    moved_GKD
        Keys of the same tokens, every position later by ``SHIFT``.
    ropes
        What the model has.
    gate
        Largest relative difference taken for rounding.

    Returns
    -------
    str or None
        None also if the keys changed in a way that no rope explains (learned positions).
    """
    size = moved_GKD.abs().max()
    if bool((key_GKD - moved_GKD).abs().max() <= gate * size):
        return None
    for name, rope in ropes.items():
        angle_F = SHIFT * torch.tensor(rope.inv_freq, dtype=torch.float64, device=key_GKD.device)
        turned_GKF = [
            torch.polar(torch.ones_like(angle_F), angle_F) * z for z in _pairs(key_GKD, angle_F)
        ]
        errors = [
            (turned - moved).abs().max()
            for turned, moved in zip(turned_GKF, _pairs(moved_GKD, angle_F), strict=True)
        ]
        if bool(min(errors) <= gate * size):
            return name
    return None


def _pairs(key_GKD: torch.Tensor, angle_F: torch.Tensor) -> list[torch.Tensor]:
    """Return the rotated part of keys as complex numbers [G, K, F], in both usual layouts.

    Pairs are (j, j + F), or neighbours (2 j, 2 j + 1).
    """
    num_pairs = len(angle_F)
    part = key_GKD[..., : 2 * num_pairs].double()
    halves = torch.complex(part[..., :num_pairs], part[..., num_pairs:])
    neighbours = torch.complex(part[..., 0::2], part[..., 1::2])
    return [halves, neighbours]
