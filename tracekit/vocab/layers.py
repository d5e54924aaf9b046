"""Layers as an estimator's text chooses them: ``all``, ``12``, ``8-15``, ``last4``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracekit.errors import UsageError


@dataclass(frozen=True)
class LayerChoice:
    """Some layers of a model whose depth is not known yet.

    Parameters
    ----------
    text
        ``all``; a number, or two with a dash between; ``last4``, the last four.
    first, last
        Their numbers, last one included; negative ones count from the top (-1).
    """

    text: str
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> LayerChoice:
        """Return the choice that a text names.

        Raises
        ------
        UsageError
            If it names none.
        """
        if text == "all":
            return cls(text, 0, -1)
        if found := re.fullmatch(r"last([1-9]\d{0,4})", text):
            return cls(text, -int(found[1]), -1)
        if found := re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text):
            return cls(text, int(found[1]), int(found[2] or found[1]))
        msg = f"layers={text} names no layers; write all, 12, 8-15 or last4."
        raise UsageError(msg)

    def __str__(self) -> str:
        return self.text

    def numbers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers' numbers in a model of so many; more than there are is all of them.

        Raises
        ------
        UsageError
            If the model has no such layer.
        """
        first, last = (one + num_layers if one < 0 else one for one in (self.first, self.last))
        if last >= num_layers or first > last:
            msg = f"layers={self.text}: the model has layers 0 to {num_layers - 1}."
            raise UsageError(msg)
        return tuple(range(max(first, 0), last + 1))
