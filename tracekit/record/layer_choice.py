"""Layers as a user chooses them: numbers, negative ones counted from the top, ranges, or all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from tracekit.spec import ModelSpec

Choice = tuple[int, ...] | Literal["all"]


def parse_layers(flag: str, text: str) -> Choice:
    """Return the layers that ``0,5,-1``, ``0-29`` or ``all`` names.

    Raises
    ------
    UsageError
        If it names none.
    """
    if text == "all":
        return "all"
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(-?\d+)(?:-(\d+))?", part.strip())
        if found is None or (found[2] and int(found[2]) < int(found[1])):
            msg = f"{flag} {text!r} names no layers; write numbers and ranges (0,5-8,-1), or all."
            raise UsageError(msg)
        first = int(found[1])
        layers += range(first, int(found[2] or first) + 1)
    return tuple(layers)


def decoder_layers(option: str, choice: Choice, spec: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of chosen layers of a model, in order, whether they attend or not.

    Parameters
    ----------
    option
        Name of the option, for the message.
    choice
        Layer numbers, negative ones counted from the top, or all.
    spec
        Of the model.

    Raises
    ------
    UsageError
        If the model has no such layer.
    """
    present = [one.index for one in spec.layers]
    if choice == "all":
        return tuple(present)
    places = _places(choice, spec)
    if missing := [layer for layer, place in places.items() if place not in present]:
        msg = f"{option}: {spec.name} has no layer {missing[0]}; it has {_listed(present)}."
        raise UsageError(msg)
    return tuple(sorted(set(places.values())))


def chosen_layers(option: str, choice: Choice, spec: ModelSpec) -> frozenset[int]:
    """Return the numbers of chosen layers of a model.

    Parameters
    ----------
    option
        Name of the option, for the message.
    choice
        Layer numbers, negative ones counted from the top, or all that have attention to be seen.
    spec
        Of the model.

    Raises
    ------
    UsageError
        If the model has no such layer, or its attention cannot be seen.
    """
    seen = [one.index for one in spec.layers if one.num_heads and one.refusal is None]
    if choice == "all":
        return frozenset(seen)
    places = _places(choice, spec)
    if missing := [layer for layer, place in places.items() if place not in seen]:
        msg = (
            f"{option}: {spec.name} has no attention that can be seen in layer {missing[0]}; "
            f"it has in {_listed(seen)}."
        )
        raise UsageError(msg)
    return frozenset(places.values())


def _places(choice: tuple[int, ...], spec: ModelSpec) -> dict[int, int]:
    """Return layer numbers as they were written, and as they are counted from the input."""
    count = len(spec.layers)
    return {layer: layer + count if layer < 0 else layer for layer in choice}


def _listed(layers: list[int]) -> str:
    """Return layer numbers as text, a whole run of them as its ends."""
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {', '.join(map(str, layers))}" if layers else "none"
