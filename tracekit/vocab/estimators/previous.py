"""Carry-over: what was likely a moment ago is likely now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.view import View

ID_BYTES = 4
"""Bytes of a token id in the pool."""


@ESTIMATORS.register("previous")
@dataclass(frozen=True)
class Previous(CausalEstimator):
    """Pool of the most likely tokens of earlier steps, the most recently used first.

    Every run of the head puts its ``top`` tokens in front of the pool, best first, and takes out
    their older entries; the pool grows up to the size asked. After MicroSpec's in-context
    vocabulary (arXiv:2605.26444), whose construction this does not claim to be. The earlier steps'
    tokens are those of their full logits: a bound, since behind a pruned head they would be those of
    its candidates, and a token once missed would be missed again.

    Parameters
    ----------
    top
        Tokens that a step puts into the pool.
    """

    name: ClassVar[str] = "previous"
    top: int = 256

    @property
    def needs(self) -> Needs:
        """The most likely tokens of earlier steps."""
        return Needs(previous=self.top)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the pool before each step, most recent first."""
        pools = []
        pool = view.memory.get("pool", torch.empty(0, dtype=torch.int64))
        is_top_V = torch.zeros(view.head_spec.num_rows, dtype=torch.bool)
        for runs_NM in view.previous_top():
            for top_M in runs_NM:
                is_top_V[top_M] = True
                # What falls off the end comes back only through the front: shorter pools are
                # prefixes of longer ones.
                pool = torch.cat([top_M, pool[~is_top_V[pool]]])[: view.head_spec.num_rows]
                is_top_V[top_M] = False
            pools.append(torch.nn.functional.pad(pool, (0, max(0, limit - len(pool))), value=-1))
        view.memory["pool"] = pool
        return torch.stack([one[:limit] for one in pools])

    def cost(self, view: View, size: int) -> Cost:
        """Return the ids of the pool, read once; the upkeep compares but does not multiply."""
        return Cost(bytes=ID_BYTES * min(size, view.head_spec.num_rows))
