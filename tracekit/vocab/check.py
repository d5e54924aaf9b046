"""What looks at a set's own logits and may ask for the whole head after all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.parameters import Named
from tracekit.registry import Registry
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    import torch

    from tracekit.vocab.estimator import Cost
    from tracekit.vocab.view import View


@dataclass(frozen=True, eq=False, kw_only=True)
class Scored:
    """What is known of some steps once the candidates have their logits, for sets of N sizes.

    Parameters
    ----------
    ids_SK
        Ranking beside the pinned tokens, int64, -1 for none.
    count_SN
        How many of it are in each set.
    pinned_P
        Tokens that are in every set.
    best_SN
        Highest logit of each set, float64; -inf where a set is empty.
    logsumexp_SN
        ln sum exp of its logits, float64, nats.
    """

    ids_SK: torch.Tensor
    count_SN: torch.Tensor
    pinned_P: torch.Tensor
    best_SN: torch.Tensor
    logsumexp_SN: torch.Tensor


class Check(Named, ABC):
    """Base of all checks: frozen dataclasses of parameters.

    A decoder runs the head on the candidates, then the check; where that is not sure, it runs the
    rest of the head too, and the step is exact.
    """

    @property
    def needs(self) -> Needs:
        """What the check reads beside the logits of the set."""
        return Needs()

    @abstractmethod
    def is_sure(self, view: View, scored: Scored) -> torch.Tensor:
        """Return whether each set is enough, bool [S, N]."""

    @abstractmethod
    def cost(self, view: View) -> Cost:
        """Return what the check itself costs a step."""


CHECKS: Registry[Check] = Registry(
    "check", package="tracekit.vocab.checks", group="tracekit.checks"
)
"""All checks by name."""
