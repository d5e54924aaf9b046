"""Which influence probes are recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import UsageError
from tracekit.kv.anchors import Anchor, PromptEnd, parse_anchor
from tracekit.record.layer_choice import Choice, chosen_layers
from tracekit.registry import unknown

if TYPE_CHECKING:
    from tracekit.kv.schedule import Spans
    from tracekit.spec import ModelSpec

PROBE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""Types in which gradients can be stored."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Which influence probes are recorded.

    Parameters
    ----------
    number
        Draws for every row: the error of a prediction falls with the root of it.
    dtype
        Type in which gradients are stored. float16 has no place for those below 6e-8.
    layers
        Those at whose attention outputs gradients are kept, negative ones counted from the top, or
        all; what is foretold is then the harm done in these.
    start
        First row that has probes: ``context``, ``prompt``, ``turn``, a number of tokens, or a
        fraction. What a sequence does not have is its prompt's end, and half of plain text. Of use
        to policies that first evict there or later.
    seed
        Of the draws; each sequence has its own, made of this one and its id.
    """

    number: int = 8
    dtype: str = "bfloat16"
    layers: Choice = "all"
    start: str = "context"
    seed: int = 0
    _anchor: Anchor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse unknown names and impossible numbers at once."""
        if self.number < 1:
            msg = f"probes must be at least 1, not {self.number}."
            raise UsageError(msg)
        if self.dtype not in PROBE_DTYPES:
            raise UsageError(unknown("probe dtype", self.dtype, list(PROBE_DTYPES)))
        if not self.layers:
            msg = "probes of no layer foretell nothing: name layers, or all."
            raise UsageError(msg)
        object.__setattr__(self, "_anchor", parse_anchor(self.start))

    def chosen(self, spec: ModelSpec) -> frozenset[int]:
        """Return the layers of a model that are probed.

        Raises
        ------
        UsageError
            If the model has no such layer.
        """
        return chosen_layers("probe layers", self.layers, spec)

    def first_row(self, spans: Spans) -> int | None:
        """Return the position of the first row that has probes; None if no row is left."""
        point = self._anchor.find(spans)
        if point is None:
            point = PromptEnd().find(spans)
        return point if point is not None and point < spans.num_rows else None

    def to_json(self, spec: ModelSpec) -> dict[str, Any]:
        """Return what decides a model's probes, for ``trace.json``."""
        return {
            "number": self.number,
            "dtype": self.dtype,
            "layers": sorted(self.chosen(spec)),
            "from": self.start,
            "seed": self.seed,
        }
