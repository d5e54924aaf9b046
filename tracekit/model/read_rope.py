"""Rotary embeddings: frequencies from the model's buffers, and which layer uses which, as seen."""

from __future__ import annotations

from typing import Any, get_args

import torch

from tracekit.measure.rope import turn_pairs
from tracekit.model.decoder import decoder_of
from tracekit.spec import RopeLayout, RopeSpec

SHIFT = 11
"""Positions by which a probe is moved to see which keys turn."""

LAYOUTS: tuple[RopeLayout, ...] = get_args(RopeLayout)

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
) -> tuple[str, RopeLayout] | None:
    """Return the rotary embedding that turned a layer's keys and its layout, None if none did.

    Attention does not see a common shift of all positions, so hidden states stay the same and keys
    differ by their rotation alone. This holds whether the config names such layers or not.

    Parameters
    ----------
    key_GKD
        Keys of a probe [G, K, D].
    moved_GKD
        Keys of the same tokens, every position later by ``SHIFT``.
    ropes
        What the model has.
    gate
        Largest relative difference taken for rounding.

    Returns
    -------
    tuple of str or None
        Name and layout, the better one where both are within the gate; None also if the keys
        changed in a way that no rope explains (learned positions).
    """
    size = float(moved_GKD.abs().max())
    if is_same(key_GKD, moved_GKD, gate=gate):
        return None
    for name, rope in ropes.items():
        angle_F = SHIFT * torch.tensor(rope.inv_freq, dtype=torch.float64, device=key_GKD.device)
        turn_F = torch.polar(torch.ones_like(angle_F), angle_F)
        # The rest of a head is not looked at: models may do there what they like.
        before, after = (one[..., : 2 * len(angle_F)].double() for one in (key_GKD, moved_GKD))
        errors = {
            layout: float((turn_pairs(before, turn_F, layout) - after).abs().max())
            for layout in LAYOUTS
        }
        # With one pair both layouts are the same, and the first of them is named.
        best = min(LAYOUTS, key=lambda layout: errors[layout])
        if errors[best] <= gate * size:
            return name, best
    return None


def is_same(one: torch.Tensor, other: torch.Tensor, *, gate: float) -> bool:
    """Return whether two tensors differ by no more than ``gate`` of the second's largest number."""
    return bool((one - other).abs().max() <= gate * other.abs().max())
