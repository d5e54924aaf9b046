"""Several estimators together: the best of each, then the second best of each, and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tracekit.vocab.estimator import Cost, Estimator
from tracekit.vocab.order import first_of_each

if TYPE_CHECKING:
    from tracekit.vocab.view import Known


@dataclass(frozen=True)
class Union(Estimator):
    """Estimators whose rankings are interleaved, in the order in which they were given.

    A token that several of them name takes its first place. The size asked is that of the union;
    each part is paid for as if it had to name that many.

    Parameters
    ----------
    members
        Two estimators or more, none of them a union.
    """

    name: ClassVar[str] = "union"
    members: tuple[Estimator, ...]

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether all parts are."""
        return all(one.causal for one in self.members)

    @property
    def text(self) -> str:
        """The parts with a ``+`` between."""
        return "+".join(one.text for one in self.members)

    @property
    def short(self) -> str:
        """The parts in short, with a ``+`` between."""
        return "+".join(one.short for one in self.members)

    @property
    def parts(self) -> tuple[Estimator, ...]:
        """The members."""
        return self.members

    def candidates(
        self, known: Known, memory: dict[str, Any], logits_SV: torch.Tensor, limit: int
    ) -> torch.Tensor:
        """Return the interleaved rankings; each part has a memory of its own."""
        ranked = [
            one.candidates(known, memory.setdefault(str(place), {}), logits_SV, limit)
            for place, one in enumerate(self.members)
        ]
        width = max(ids_SK.shape[1] for ids_SK in ranked)
        padded = [
            torch.nn.functional.pad(ids_SK, (0, width - ids_SK.shape[1]), value=-1)
            for ids_SK in ranked
        ]
        return first_of_each(torch.stack(padded, 2).flatten(1), logits_SV.shape[1])[:, :limit]

    def price(self, known: Known, memory: dict[str, Any], size: int) -> Cost:
        """Return the sum of the parts' costs."""
        costs = (
            one.price(known, memory.setdefault(str(place), {}), size)
            for place, one in enumerate(self.members)
        )
        return sum(costs, start=Cost())
