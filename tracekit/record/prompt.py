"""One prompt: a chat or raw text, what is marked in it, and how its answer can be judged.

Beside it, a conversation that was held already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Mark = tuple[str, int, int]
"""A span of a message: its kind (context, question, needle, answer), first character and end."""

_SPAN_KINDS = ("needle", "answer")


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat: ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class MarkedSpan:
    """Words of a prompt that a measure looks for: ``kind`` is needle or answer.

    The words stand in the prompt exactly once, letter by letter.
    """

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a model is asked.

    Parameters
    ----------
    id, domain
        Name, unique in its file, and kind of text: ``story``, ``code``...
    messages
        A chat that ends with a user message; user messages that no assistant message follows are
        answered one by one. None where ``text`` is given.
    text
        Raw text, without chat template. None where ``messages`` are given.
    context, question
        The two parts of the last message, where they are told apart; a blank line joins them.
    max_new_tokens
        Most tokens of an answer; None leaves it to the caller.
    spans
        Marked words; where two overlap, the later one holds.
    check
        How the answer can be judged: ``kind`` is exact, regex, number or python.

    Raises
    ------
    InputError
        If a part is empty, out of order or not Unicode text, or a span is not there once.
    """

    id: str
    domain: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    context: str | None = None
    question: str | None = None
    max_new_tokens: int | None = None
    spans: tuple[MarkedSpan, ...] = ()
    check: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what no model can be asked."""
        _accept_messages(self)
        texts = [message.content for message in self.messages or ()] or [self.text or ""]
        for text in (self.id, self.domain, *texts):
            _accept_text(text)
        for span in self.spans:
            count = sum(text.count(span.text) for text in texts)
            if span.kind not in _SPAN_KINDS or count != 1:
                msg = (
                    f"a span must be a {' or '.join(_SPAN_KINDS)} that is there once; {span} is not"
                )
                raise InputError(msg)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            msg = f"max_new_tokens must be at least 1, not {self.max_new_tokens}"
            raise InputError(msg)

    def marked(self, content: str) -> Iterator[Mark]:
        """Yield the spans of one of its messages; where two overlap, the later one holds."""
        if self.context is not None and content == join(self.context, self.question or ""):
            yield "context", 0, len(self.context)
            yield "question", len(self.context), len(content)
        for span in self.spans:
            if (low := content.find(span.text)) >= 0:
                yield span.kind, low, low + len(span.text)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was said before, the assistant's replies included; nothing is generated.

    Parameters
    ----------
    id, domain
        Name, unique in its file, and kind of text.
    messages
        Perhaps a system message, then user and assistant in any order; any of them may be last.

    Raises
    ------
    InputError
        If a part is empty, out of order or not Unicode text.
    """

    id: str
    domain: str
    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        """Refuse what is no conversation."""
        roles = " ".join(message.role for message in self.messages)
        if not re.fullmatch("(system )?(user|assistant)( (user|assistant))*", roles):
            msg = (
                "messages must be the user's and the assistant's, after at most one system "
                f"message; these are: {roles or 'none'}"
            )
            raise InputError(msg)
        for text in (self.id, self.domain, *(message.content for message in self.messages)):
            _accept_text(text)


def _accept_messages(prompt: Prompt) -> None:
    if (prompt.messages is None) == (prompt.text is None):
        msg = "a prompt has either messages or text"
        raise InputError(msg)
    if prompt.messages is not None:
        roles = " ".join(message.role for message in prompt.messages)
        if not re.fullmatch("(system )?(user (assistant )?)*user", roles):
            msg = (
                "messages must be the user's, each perhaps with the assistant's reply, after at "
                f"most one system message, the last one the user's; these are: {roles or 'none'}"
            )
            raise InputError(msg)


def _accept_text(text: str) -> None:
    if not text.strip():
        msg = "an id, a domain, a message or the text is empty"
        raise InputError(msg)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = f"has a lone surrogate, which is half a character, at character {error.start + 1}"
        raise InputError(msg) from error


def join(context: str, question: str) -> str:
    """Return the message that asks ``question`` about ``context``: a blank line between them."""
    return f"{context}\n\n{question}"
