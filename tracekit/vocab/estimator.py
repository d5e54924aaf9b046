"""What an estimator is: it ranks candidate tokens for each step before the head runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from tracekit.errors import UsageError
from tracekit.registry import Registry, unknown
from tracekit.vocab.view import Needs, View

if TYPE_CHECKING:
    import torch

    from tracekit.measure.head import Head
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

    macs: int = 0
    bytes: int = 0


class Estimator(ABC):
    """Base of all estimators: frozen dataclasses whose fields are whole-number parameters.

    Subclass ``CausalEstimator`` for a method and ``HindsightEstimator`` for a bound.

    Raises
    ------
    UsageError
        If a parameter is below 1.
    """

    name: ClassVar[str]
    causal: ClassVar[bool]

    def __post_init__(self) -> None:
        for one in _parameters(self):
            if getattr(self, one.name) < 1:
                msg = f"{self.text}: {one.name} must be at least 1."
                raise UsageError(msg)

    @property
    def text(self) -> str:
        """Canonical text, the estimator's identity: ``lowrank:rank=64``."""
        pairs = ",".join(f"{one.name}={getattr(self, one.name)}" for one in _parameters(self))
        return f"{self.name}:{pairs}" if pairs else self.name

    @property
    def needs(self) -> Needs:
        """What the estimator reads; nothing unless it says so."""
        return Needs()

    @abstractmethod
    def candidates(self, known: Known, logits_SV: torch.Tensor, limit: int) -> torch.Tensor:
        """Return the ranking, having opened the door that this kind of estimator may use."""

    @abstractmethod
    def cost(self, head: Head, size: int) -> Cost:
        """Return what naming ``size`` candidates costs a step, beside their rows of the head."""


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

    def candidates(self, known: Known, logits_SV: torch.Tensor, limit: int) -> torch.Tensor:
        """Return the ranking; the logits stay outside."""
        del logits_SV
        return self.ranking(View(known, self.needs, self.text), limit)


class HindsightEstimator(Estimator):
    """A bound on what estimators can do: it sees the logits that it is to foretell."""

    causal: ClassVar[bool] = False

    @abstractmethod
    def ranking(self, logits_SV: torch.Tensor, limit: int) -> torch.Tensor:
        """Return candidates as ``CausalEstimator.ranking`` does, from the true logits [S, V]."""

    def candidates(self, known: Known, logits_SV: torch.Tensor, limit: int) -> torch.Tensor:
        """Return the ranking from the logits alone."""
        del known
        return self.ranking(logits_SV, limit)


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
    name, colon, rest = text.strip().partition(":")
    kind = ESTIMATORS.get(name)
    known = [one.name for one in _parameters(kind)]
    values: dict[str, int] = {}
    for pair in rest.split(",") if colon else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in known:
            raise UsageError(unknown(f"parameter of {name}", key, known or ["none"]))
        if key in values or not value.isdecimal():
            msg = f"{pair.strip()!r} in {text!r}: give {key} once, as a whole number."
            raise UsageError(msg)
        values[key] = int(value)
    return kind(**values)


def _parameters(estimator: Any) -> tuple[Any, ...]:
    """Return the dataclass fields of an estimator or of its class, in order."""
    return fields(estimator)
