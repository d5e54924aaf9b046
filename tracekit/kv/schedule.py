"""When a policy decides: once at a point, after each turn, or every N tokens from a point.

A decision is named by the number of tokens seen, t: the cache then holds positions 0 .. t-1, and
the row at position t is the first that reads the reduced cache. Rows from the point on are scored;
``evict-prompt=CHUNK`` decides before it too, after each chunk of the prompt, which then never
stands in the cache as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from tracekit.errors import UsageError
from tracekit.kv.anchors import Anchor, parse_anchor


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Where the parts of a sequence end, in tokens from its start.

    Parameters
    ----------
    num_tokens
        Length of the sequence, the last token included.
    context_end
        Length of the context that a question follows; None where they are not apart.
    prompt_end
        Length of the prompt; None for plain text.
    turn_ends
        Length after each turn.
    template
        Positions of the chat template's tokens.
    """

    num_tokens: int
    context_end: int | None = None
    prompt_end: int | None = None
    turn_ends: tuple[int, ...] = ()
    template: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens that enter the cache: all but the last."""
        return self.num_tokens - 1


@dataclass(frozen=True)
class Schedule(ABC):
    """When decisions are made.

    Parameters
    ----------
    start
        Where the first decision is made that scored rows follow.
    evict_prompt
        Tokens of a chunk of the prompt after each of which a decision is made too; None: the prompt
        is read as a whole.
    """

    start: Anchor
    evict_prompt: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.evict_prompt is not None and self.evict_prompt < 1:
            msg = f"evict-prompt={self.evict_prompt} is a chunk of at least 1 token."
            raise UsageError(msg)

    @property
    def items(self) -> dict[str, str]:
        """The parameters of the text form, in order."""
        chunk = {} if self.evict_prompt is None else {"evict-prompt": str(self.evict_prompt)}
        return self._items | chunk

    @property
    @abstractmethod
    def _items(self) -> dict[str, str]:
        """Those of a kind of schedule."""

    def decisions(self, point: int, spans: Spans) -> tuple[int, ...]:
        """Return the numbers of tokens seen at which a decision is made.

        Parameters
        ----------
        point
            The first decision that scored rows follow; the first of all without ``evict_prompt``.
        spans
            Of the sequence. Its last token never enters the cache: only decisions that a row
            follows are returned.
        """
        later = self._decisions(point, spans)
        if self.evict_prompt is None or not later:
            return later
        return (*range(self.evict_prompt, point, self.evict_prompt), *later)

    @abstractmethod
    def _decisions(self, point: int, spans: Spans) -> tuple[int, ...]:
        """Return those from the point on."""

    @property
    def text(self) -> str:
        """The text form: ``at=prompt``, ``every=16,from=prompt``."""
        return ",".join(f"{name}={value}" for name, value in self.items.items())

    def point(self, spans: Spans) -> int | None:
        """Return the tokens seen at the first decision.

        None if the sequence has no such point with at least one token before and after it: the
        caller skips the sequence and counts it.
        """
        point = self.start.find(spans)
        return point if point is not None and 0 < point < spans.num_tokens else None

    def query_aware(self, spans: Spans) -> bool:
        """Return whether a question, or a part of one, lies before the first decision.

        A question is what lies between context and end of the prompt; where they are not apart it
        is taken to end the prompt, and plain text has none.
        """
        point = self.point(spans)
        if point is None or spans.prompt_end is None:
            return False
        if spans.context_end is None:
            return point >= spans.prompt_end
        return point > spans.context_end


@dataclass(frozen=True)
class Once(Schedule):
    """One decision; entries that come later all stay."""

    @property
    def _items(self) -> dict[str, str]:
        """``at``."""
        return {"at": self.start.text}

    def _decisions(self, point: int, spans: Spans) -> tuple[int, ...]:
        """Return the point alone."""
        return (point,) if point < spans.num_rows else ()


@dataclass(frozen=True)
class EachTurn(Schedule):
    """A decision after each turn, the first of them the start; what a turn adds stays until then."""

    @property
    def _items(self) -> dict[str, str]:
        """``at``."""
        return {"at": self.start.text}

    def _decisions(self, point: int, spans: Spans) -> tuple[int, ...]:
        """Return the ends of the turns from the point on."""
        return tuple(end for end in spans.turn_ends if point <= end < spans.num_rows)


@dataclass(frozen=True)
class Every(Schedule):
    """A decision every so many tokens; in between up to ``every`` - 1 more entries are held.

    Parameters
    ----------
    every
        Tokens between decisions.
    above
        Tokens that must have been seen before the first decision.
    """

    every: int
    above: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1 or self.above < 0:
            msg = f"every={self.every} must be at least 1 token, above={self.above} not negative."
            raise UsageError(msg)

    @property
    def _items(self) -> dict[str, str]:
        """``every`` and ``from``, and ``above`` where there is one."""
        above = {"above": str(self.above)} if self.above else {}
        return {"every": str(self.every), "from": self.start.text} | above

    def point(self, spans: Spans) -> int | None:
        """Return the tokens seen at the first decision, like the others, but at least ``above``."""
        point = super().point(spans)
        point = None if point is None else max(point, self.above)
        return point if point is not None and point < spans.num_tokens else None

    def _decisions(self, point: int, spans: Spans) -> tuple[int, ...]:
        """Return the point and each ``every`` tokens after it."""
        return tuple(range(point, spans.num_rows, self.every))


def parse_schedule(items: dict[str, str]) -> Schedule:
    """Return the schedule of ``at``, or ``every``, ``from`` and ``above``; and ``evict-prompt``.

    Raises
    ------
    UsageError
        If they are not one of the two, or a value is out of range.
    """
    names = items.keys() - {"evict-prompt"}
    chunk = _tokens("evict-prompt", items["evict-prompt"]) if "evict-prompt" in items else None
    if names == {"at"}:
        kind = EachTurn if items["at"] == "turn" else Once
        return kind(parse_anchor(items["at"]), evict_prompt=chunk)
    if {"every", "from"} <= names <= {"every", "from", "above"}:
        every, above = (_tokens(name, items.get(name, "0")) for name in ("every", "above"))
        return Every(parse_anchor(items["from"]), every, above, evict_prompt=chunk)
    msg = "at=POINT decides once, every=N with from=POINT again and again: name one of the two."
    raise UsageError(msg)


def _tokens(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        msg = f"{name}={text!r} is no number of tokens."
        raise UsageError(msg) from error
