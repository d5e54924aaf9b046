"""How the next token is chosen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tracekit.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the next token is chosen.

    Parameters
    ----------
    temperature
        0 is greedy; otherwise tokens are drawn from the distribution at this temperature.
    top_k
        Keep the k most likely tokens; 0 keeps all.
    top_p
        Keep the smallest set with this probability; 1 keeps all.
    min_p
        Keep tokens with at least this share of the largest probability; 0 keeps all.
    repetition_penalty
        Divide (multiply, if negative) the logits of tokens that were there before; 1 does nothing.
        Applies to a greedy choice as well.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no sampler does."""
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                msg = f"{name} must be {wanted}, not {getattr(self, name)}."
                raise UsageError(msg)

    def to_json(self) -> dict[str, Any]:
        """Return the settings for the trace."""
        return asdict(self)
