"""Small random sequences with a head, shared by the tests of the vocabulary engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit.measure.head import Head
from tracekit.spec import HeadSpec
from tracekit.vocab.engine import VocabCell, blocks, evaluate
from tracekit.vocab.fit import Fit

if TYPE_CHECKING:
    from tracekit.vocab.estimator import Estimator

OWN = "own"
PROMPTS = (OWN, "b", "c")


@dataclass(frozen=True)
class Case:
    """One sequence of prompt ``own`` in a trace of three prompts."""

    hidden_TE: torch.Tensor
    token_ids_T: torch.Tensor
    scored_S: torch.Tensor
    head: Head
    pinned_ids: torch.Tensor
    trace: tuple[tuple[str, int], ...]

    @property
    def shared(self) -> dict[str, Any]:
        tokens = [token for _, token in self.trace]
        prompts = [prompt for prompt, _ in self.trace]
        fit = Fit.count(np.array(tokens), np.array(prompts), num_rows=self.width)
        return {
            "hidden_TE": self.hidden_TE,
            "token_ids_T": self.token_ids_T,
            "scored_S": self.scored_S,
            "head": self.head,
            "fit": fit.without(OWN),
        }

    @property
    def width(self) -> int:
        return self.head.spec.num_rows

    def logits(self) -> list[list[float]]:
        """Logits of all rows."""
        return self.head.logits(self.hidden_TE).tolist()

    def candidates(self, estimator: Estimator, limit: int) -> list[list[int]]:
        """Return the ranking of each scored step, without the -1 at its end."""
        ranked = []
        for block in blocks(**self.shared, num_top=estimator.needs.previous):
            ids_SK = estimator.candidates(block.known, block.logits_SV, limit)
            assert ids_SK.dtype == torch.int64
            assert ids_SK.shape[0] == len(block.chosen_S)
            assert ids_SK.shape[1] <= limit
            ranked += [[i for i in row if i >= 0] for row in ids_SK.tolist()]
        return ranked

    def evaluate(self, estimators: list[Estimator], sizes: list[int]) -> list[VocabCell]:
        return evaluate(estimators, sizes, pinned_ids=self.pinned_ids, **self.shared)

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


def make_case(
    seed: int = 0,
    *,
    width: int = 23,
    size: int = 6,
    num_rows: int = 9,
    scored: list[int] | None = None,
    num_pinned: int = 3,
    has_bias: bool = False,
    spread: float = 1.0,
) -> Case:
    """Return a random case; ``spread`` scales the logits, 0 makes them all equal."""
    rng = torch.Generator().manual_seed(seed)
    rows = list(range(num_rows // 2, num_rows)) if scored is None else scored
    spec = HeadSpec(num_rows=width, hidden_size=size, has_bias=has_bias)
    bias_V = torch.randn(width, generator=rng) * spread if has_bias else None
    ids = torch.randint(width, (3, num_rows + 1), generator=rng)
    trace = [
        (prompt, token) for prompt, row in zip(PROMPTS, ids.tolist(), strict=True) for token in row
    ]
    return Case(
        hidden_TE=torch.randn(num_rows, size, generator=rng),
        token_ids_T=ids[0],
        scored_S=torch.tensor(rows, dtype=torch.int64),
        head=Head(torch.randn(width, size, generator=rng) * spread, bias_V, spec),
        pinned_ids=torch.randperm(width, generator=rng)[:num_pinned],
        trace=tuple(trace),
    )
