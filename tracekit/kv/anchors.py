"""Points of a sequence at which a schedule starts: the end of a part, a token, or a fraction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.kv.amounts import Amount, Frac, parse_part, part_text

if TYPE_CHECKING:
    from tracekit.kv.schedule import Spans

HALF = Frac(0.5)
"""Where the prompt is said to end in plain text, which has none: half of the length."""


@dataclass(frozen=True)
class Anchor(ABC):
    """A point of a sequence at which a schedule starts."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What ``parse_anchor`` reads back."""

    @abstractmethod
    def find(self, spans: Spans) -> int | None:
        """Return the number of tokens before the point; None if the sequence has no such point."""


@dataclass(frozen=True)
class ContextEnd(Anchor):
    """After the context, before the question."""

    @property
    def text(self) -> str:
        """Its name."""
        return "context"

    def find(self, spans: Spans) -> int | None:
        """Return the length of the context."""
        return spans.context_end


@dataclass(frozen=True)
class PromptEnd(Anchor):
    """After the whole prompt; in plain text, which has none, half of the length."""

    @property
    def text(self) -> str:
        """Its name."""
        return "prompt"

    def find(self, spans: Spans) -> int | None:
        """Return the length of the prompt."""
        return HALF.of(spans.num_tokens) if spans.prompt_end is None else spans.prompt_end


@dataclass(frozen=True)
class TurnEnd(Anchor):
    """After the first turn."""

    @property
    def text(self) -> str:
        """Its name."""
        return "turn"

    def find(self, spans: Spans) -> int | None:
        """Return the end of the first turn."""
        return spans.turn_ends[0] if spans.turn_ends else None


@dataclass(frozen=True)
class Part(Anchor):
    """After a number of tokens, or after a fraction of the sequence (rounded down)."""

    part: Amount

    @property
    def text(self) -> str:
        """The amount."""
        return part_text(self.part)

    def find(self, spans: Spans) -> int | None:
        """Return the amount of the sequence's length."""
        return self.part.of(spans.num_tokens)


_NAMED: dict[str, Anchor] = {"context": ContextEnd(), "prompt": PromptEnd(), "turn": TurnEnd()}


def parse_anchor(text: str) -> Anchor:
    """Return the anchor ``context``, ``prompt``, ``turn``, a number of tokens, or a fraction.

    Raises
    ------
    UsageError
        If the text is none of them.
    """
    return _NAMED[text] if text in _NAMED else Part(parse_part(text))
