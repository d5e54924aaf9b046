"""A text that was made of messages, and where in it each one stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tracekit.record.prompt import Message

BLANK_LINE = "\n\n"
"""Between messages where there is no template."""


@dataclass(frozen=True)
class Written:
    """A message in a text: its turn, the range where it is shown, and its content as given."""

    turn: int
    start: int
    end: int
    content: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A text with the ends of its turns, the first of which is ``first_turn``, and its messages.

    ``roles`` has a further one, that of an answer to come, where there is one.
    """

    text: str
    first_turn: int
    roles: tuple[str | None, ...]
    turn_ends: tuple[int, ...]
    written: tuple[Written, ...]

    def is_written_C(self) -> NDArray[np.bool_]:
        """Return whether each character is a message's, not the template's."""
        is_written_C = np.zeros(len(self.text), dtype=np.bool_)
        for message in self.written:
            is_written_C[message.start : message.end] = True
        return is_written_C

    def after(self, answered: int) -> Layout:
        """Return what follows the answer that is turn ``answered``."""
        cut = self.written[answered].end
        return Layout(
            text=self.text[cut:],
            first_turn=answered,
            roles=self.roles[answered:],
            turn_ends=tuple(end - cut for end in self.turn_ends[answered:]),
            written=tuple(
                replace(message, start=message.start - cut, end=message.end - cut)
                for message in self.written[answered + 1 :]
            ),
        )


def plain_layout(text: str) -> Layout:
    """Return a text that is no message of anybody's."""
    whole = Written(0, 0, len(text), text)
    return Layout(text=text, first_turn=0, roles=(None,), turn_ends=(), written=(whole,))


def joined_layout(messages: Sequence[Message], first_turn: int = 0) -> Layout:
    """Return the contents of messages with a blank line before each but the first.

    Parameters
    ----------
    messages
        With their roles; a blank line belongs to the turn of the message after it.
    first_turn
        Above 0, these messages follow an answer that is turn ``first_turn``: it ends at once, and
        the first of them has a blank line before it as well.
    """
    is_later = first_turn > 0
    text, ends, written = "", [0] if is_later else [], []
    for turn, message in enumerate(messages, start=first_turn + is_later):
        text += BLANK_LINE if turn else ""
        start = len(text)
        text += message.content
        ends.append(len(text))
        written.append(Written(turn, start, len(text), message.content))
    before = ("assistant",) if is_later else ()
    return Layout(
        text=text,
        first_turn=first_turn,
        roles=(*before, *(message.role for message in messages), "assistant"),
        turn_ends=tuple(ends),
        written=tuple(written),
    )
