"""How the full run is read when another is compared with it: as it is, or as llama.cpp does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, final

from tracekit.errors import UsageError
from tracekit.measure.llama_cpp import FLOOR_NATS, coded_log_probs

if TYPE_CHECKING:
    import torch

RESOLUTION_NATS = 1e-13
"""A divergence below this is the rounding of its float64 sums: it is given as 0."""


class Convention(ABC):
    """How the base, the full run, is read."""

    name: ClassVar[str]

    @abstractmethod
    def base(self, logits_TV: torch.Tensor, logp_TV: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of the base, float64 [T, V], from its logits and their own."""

    @abstractmethod
    def top(self, logits_TV: torch.Tensor, base_TV: torch.Tensor) -> torch.Tensor:
        """Return the most likely token of the full run, int64 [T]."""

    @abstractmethod
    def kl_nats(
        self, base_TV: torch.Tensor, prob_TV: torch.Tensor, logq_TV: torch.Tensor
    ) -> torch.Tensor:
        """Return KL(base || q), float64 [T]; ``prob_TV`` is the run's own, not the base's."""


@final
class Exact(Convention):
    """The full run as it is, and KL over all tokens."""

    name = "tracekit"

    def base(self, logits_TV: torch.Tensor, logp_TV: torch.Tensor) -> torch.Tensor:
        """Return the run's own log-probabilities."""
        del logits_TV
        return logp_TV

    def top(self, logits_TV: torch.Tensor, base_TV: torch.Tensor) -> torch.Tensor:
        """Return that of the logits: in log-probabilities near ones may round to a tie."""
        del base_TV
        return logits_TV.argmax(1)

    def kl_nats(
        self, base_TV: torch.Tensor, prob_TV: torch.Tensor, logq_TV: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum over all tokens."""
        return resolved(expectation(prob_TV, base_TV - logq_TV))


@final
class LlamaCpp(Convention):
    """As llama.cpp's ``llama-perplexity --kl-divergence`` reads its base file.

    Log-probabilities pass through 16 bits, KL is summed over those above -16 only (it may come out
    below 0), and surprisal, probability and most likely token of the base are those decoded.
    Entropy, JSD and the full run's margin, which that tool does not print, stay those of the run
    itself. Differs from the tool in taking sums and exponentials in float64.
    """

    name = "llama.cpp"

    def base(self, logits_TV: torch.Tensor, logp_TV: torch.Tensor) -> torch.Tensor:
        """Return what the codes decode to."""
        del logp_TV
        return coded_log_probs(logits_TV).double()

    def top(self, logits_TV: torch.Tensor, base_TV: torch.Tensor) -> torch.Tensor:
        """Return that of the decoded log-probabilities."""
        del logits_TV
        return base_TV.argmax(1)

    def kl_nats(
        self, base_TV: torch.Tensor, prob_TV: torch.Tensor, logq_TV: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum over tokens whose decoded log-probability is above -16."""
        del prob_TV
        weight_TV = base_TV.exp().masked_fill_(base_TV <= FLOOR_NATS, 0)
        return expectation(weight_TV, base_TV - logq_TV)


EXACT, LLAMA_CPP = Exact(), LlamaCpp()

CONVENTIONS: dict[str, Convention] = {one.name: one for one in (EXACT, LLAMA_CPP)}


def convention_of(name: str) -> Convention:
    """Return a convention by its name.

    Raises
    ------
    UsageError
        If there is none.
    """
    if name not in CONVENTIONS:
        msg = f"there is no convention {name!r}: give one of {', '.join(CONVENTIONS)}."
        raise UsageError(msg)
    return CONVENTIONS[name]


def expectation(prob_TV: torch.Tensor, value_TV: torch.Tensor) -> torch.Tensor:
    """Return sums of probability times value, [T]: probability 0 times infinity adds nothing."""
    return (prob_TV * value_TV).nansum(1)


def resolved(divergence_T: torch.Tensor) -> torch.Tensor:
    """Return divergences, those below ``RESOLUTION_NATS`` as 0."""
    return divergence_T.masked_fill(divergence_T < RESOLUTION_NATS, 0)
