"""The newest keys stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.kv.scorer import EVERY_STEP, SCORERS, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("recency")
@dataclass(frozen=True)
class Recency(Scorer):
    """Score = position, so that the newest keys stay, beside sinks where there are some.

    Serves ``streamingllm`` (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453, section 3.2: 4
    sinks, keys turned to their place in the cache), ``streaming`` (the same keys at their original
    positions) and ``window`` (no sinks), all at every step. kvpress decides once, after the prompt,
    and leaves keys where they are: that is ``streaming:at=prompt``.
    """

    presets: ClassVar = (
        Preset(
            name="streaming",
            what="Sinks and the newest keys, at their original positions",
            sinks=4,
            schedule=EVERY_STEP,
        ),
        Preset(
            name="streamingllm",
            what="Sinks and the newest keys, turned to their place in the cache",
            sinks=4,
            schedule=EVERY_STEP,
            items=(("positions", "cache"),),
        ),
        Preset(name="window", what="The newest keys alone", schedule=EVERY_STEP),
    )

    def score(self, view: View) -> torch.Tensor:
        """Return positions, [1, 1, 1, K]."""
        return view.position_K[None, None, None].float()
