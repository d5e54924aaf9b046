"""What an estimator is: it ranks candidate tokens for each step before the head runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tracekit.parameters import Named, check_numbers, make, split
from tracekit.registry import Registry
from tracekit.vocab.view import Needs, View

if TYPE_CHECKING:
    import torch

    from tracekit.vocab.view import Known


@dataclass(frozen=True)
class Cost:
    """What naming the candidates costs a step, beside the rows of the candidates themselves.

    Parameters
    ----------
    macs
        Multiply-adds.
    bytes
        Bytes read.
    """

    macs: float = 0
    bytes: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.macs + other.macs, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.macs * factor, self.bytes * factor)


class Estimator(Named, ABC):
    """Base of all estimators: frozen dataclasses of parameters.

    Subclass ``CausalEstimator`` for a method and ``HindsightEstimator`` for a bound.

    Raises
    ------
    UsageError
        If a whole-number parameter is below ``least``, or another number below 0 or not finite.
    """

    causal: ClassVar[bool]
    least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_numbers(self, self.text, self.least)

    @property
    def parts(self) -> tuple[Estimator, ...]:
        """The estimators that it is made of: itself, unless it is a union."""
        return (self,)

    @property
    def needs(self) -> Needs:
        """What the estimator reads; nothing unless it says so."""
        return Needs()

    @abstractmethod
    def candidates(
        self, known: Known, memory: dict[str, Any], logits_SV: torch.Tensor, limit: int
    ) -> torch.Tensor:
        """Return the ranking, having opened the door that this kind of estimator may use."""

    @abstractmethod
    def price(self, known: Known, memory: dict[str, Any], size: int) -> Cost:
        """Return what naming ``size`` candidates costs a step, mean over the steps."""


class CausalEstimator(Estimator):
    """An estimator that a decoder could run: its view holds nothing that the head gives at t."""

    causal: ClassVar[bool] = True

    @abstractmethod
    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return candidates for each step, best first.

        Parameters
        ----------
        view
            What is known before each step's head runs.
        limit
            Candidates wanted, at most V; smaller sizes are prefixes.

        Returns
        -------
        Tensor
            int64 [S, K], K <= limit, no id twice in a row; -1 where a step has fewer.
        """

    @abstractmethod
    def cost(self, view: View, size: int) -> Cost:
        """Return what naming ``size`` candidates costs a step, beside their rows of the head.

        The mean over the steps of the view, ranked before; what the head's type and the length of
        the context are, the view knows. Larger sets cost no less.
        """

    def candidates(
        self, known: Known, memory: dict[str, Any], logits_SV: torch.Tensor, limit: int
    ) -> torch.Tensor:
        """Return the ranking; the logits stay outside."""
        del logits_SV
        return self.ranking(View(known, self.needs, self.text, memory), limit)

    def price(self, known: Known, memory: dict[str, Any], size: int) -> Cost:
        """Return the cost, as the view tells it."""
        return self.cost(View(known, self.needs, self.text, memory), size)


class HindsightEstimator(Estimator):
    """A bound on what estimators can do: it sees the logits that it is to foretell.

    It costs the whole head, because no cheaper way to its candidates exists.
    """

    causal: ClassVar[bool] = False

    @abstractmethod
    def ranking(self, logits_SV: torch.Tensor, limit: int) -> torch.Tensor:
        """Return candidates as ``CausalEstimator.ranking`` does, from the true logits [S, V]."""

    def candidates(
        self, known: Known, memory: dict[str, Any], logits_SV: torch.Tensor, limit: int
    ) -> torch.Tensor:
        """Return the ranking from the logits alone."""
        del known, memory
        return self.ranking(logits_SV, limit)

    def price(self, known: Known, memory: dict[str, Any], size: int) -> Cost:
        """Return the cost of the full head."""
        del memory, size
        return Cost(macs=known.decoder.head.macs, bytes=known.decoder.head.num_bytes)


ESTIMATORS: Registry[Estimator] = Registry(
    "estimator", package="tracekit.vocab.estimators", group="tracekit.estimators"
)
"""All estimators by name."""


def parse_estimator(text: str) -> Estimator:
    """Return the estimator that a text names: ``oracle``, ``lowrank:rank=64``.

    Raises
    ------
    UsageError
        If the name or a parameter does not exist, comes twice, or has no valid value.
    """
    name, _, rest = text.strip().partition(":")
    estimator: Estimator = make(ESTIMATORS.get(name), split(rest))
    return estimator
