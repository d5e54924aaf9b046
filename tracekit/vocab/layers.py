"""Layers and heads as an estimator's text chooses them: ``all``, ``8-15``, ``last4``, ``18.6/17.5``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracekit.errors import UsageError


@dataclass(frozen=True)
class _Part:
    """Layers from one number to another, last one included, negative ones counted from the top."""

    text: str
    first: int
    last: int
    head: int | None = None

    def numbers(self, num_layers: int) -> range:
        first, last = (one + num_layers if one < 0 else one for one in (self.first, self.last))
        if first > last:
            msg = f"layers={self.text}: write the lower number first."
            raise UsageError(msg)
        if last >= num_layers or last < 0:
            msg = f"layers={self.text}: the model has layers 0 to {num_layers - 1}."
            raise UsageError(msg)
        return range(max(first, 0), last + 1)


@dataclass(frozen=True)
class LayerChoice:
    """Some layers, or single heads of them, of a model whose depth is not known yet.

    Parameters
    ----------
    text
        Parts with ``/`` between: ``all``; a number, or two with a dash between; ``last4``, the last
        four; ``-1``, the last; ``18.6``, query head 6 of layer 18.
    parts
        What they name.
    """

    text: str
    parts: tuple[_Part, ...]

    @classmethod
    def parse(cls, text: str) -> LayerChoice:
        """Return the choice that a text names.

        Raises
        ------
        UsageError
            If it names none.
        """
        return cls(text, tuple(map(_part, text.split("/"))))

    def __str__(self) -> str:
        return self.text

    def numbers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers' numbers in a model of so many, ascending; ``lastN`` may be all.

        Raises
        ------
        UsageError
            If the model has no such layer.
        """
        return tuple(sorted({layer for part in self.parts for layer in part.numbers(num_layers)}))

    def heads(self, layer: int, num_layers: int, num_heads: int) -> tuple[int, ...]:
        """Return the query heads chosen of a layer of so many, ascending.

        Raises
        ------
        UsageError
            If the layer has no such head.
        """
        heads: set[int] = set()
        for part in self.parts:
            if layer in part.numbers(num_layers):
                heads |= set(range(num_heads)) if part.head is None else {part.head}
        if max(heads, default=0) >= num_heads:
            msg = f"layers={self.text}: layer {layer} has heads 0 to {num_heads - 1}."
            raise UsageError(msg)
        return tuple(sorted(heads))


def _part(text: str) -> _Part:
    if text == "all":
        return _Part(text, 0, -1)
    if found := re.fullmatch(r"last([1-9]\d{0,4})", text):
        return _Part(text, -int(found[1]), -1)
    if found := re.fullmatch(r"(-?\d{1,5})(?:-(\d{1,5}))?", text):
        return _Part(text, int(found[1]), int(found[2] or found[1]))
    if found := re.fullmatch(r"(\d{1,5})\.(\d{1,5})", text):
        return _Part(text, int(found[1]), int(found[1]), int(found[2]))
    msg = (
        f"layers={text} names no layers; write all, 12, 8-15 or last4, or heads such as 18.6/17.5."
    )
    raise UsageError(msg)
