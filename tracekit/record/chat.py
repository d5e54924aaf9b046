"""Messages through a chat template, without losing which characters are whose.

Where the messages stand is learned from a second rendering in which each is a mark: what surrounds
the marks is the template's.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError

from tracekit.errors import InputError
from tracekit.record.layout import Layout, Written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.record.prompt import Message

_ELSE = "use --raw, or give 'text' instead"


class Chat:
    """A tokenizer's chat template over the messages of one prompt or conversation.

    Parameters
    ----------
    name
        Of the prompt, for errors.
    messages
        All that may be laid out, marks aside.
    tokenizer
        With a chat template.

    Raises
    ------
    InputError
        If the tokenizer has no chat template.
    """

    def __init__(self, name: str, messages: Sequence[Message], tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            msg = f"prompt {name!r} has messages, but the tokenizer has no chat template; {_ELSE}."
            raise InputError(msg)
        self._name = name
        self._tokenizer = tokenizer
        stem = "Mark"
        while any(stem in message.content for message in messages):
            stem += "Mark"
        self._stem = stem

    def mark(self, number: int) -> str:
        """Return the words that stand for message ``number``: in no message, none inside another."""
        return f"{self._stem}{number}End"

    def apply(self, messages: Sequence[Message], *, answer: bool) -> str:
        """Return the messages as the template writes them, with the opening of an answer or not."""
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return str(
            self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer)
        )

    def lay_out(self, messages: Sequence[Message], *, answer: bool) -> Layout:
        """Return the rendered messages, with the opening of an answer or not, and their places.

        Raises
        ------
        InputError
            If the template refuses, drops, moves or rewrites a message.
        """
        with self._errors():
            marked = [replace(m, content=self.mark(n)) for n, m in enumerate(messages)]
            gaps = self._gaps(self.apply(marked, answer=answer), len(marked))
            text = self.apply(messages, answer=answer)
            end, turn_ends, written = 0, [], []
            for n, message in enumerate(messages):
                shown = self._shown(text[end:], gaps[n], message.content, gaps[n + 1], n)
                start = end + len(gaps[n])
                end = start + len(shown)
                written.append(Written(n, start, end, message.content))
                turn_ends.append(end + len(self._close(marked[: n + 1], gaps[n + 1])))
            if end + len(gaps[-1]) != len(text):
                self._refuse("rewrites", len(messages) - 1)
        return Layout(
            text=text,
            first_turn=0,
            roles=(*(message.role for message in messages), "assistant"),
            turn_ends=tuple(turn_ends),
            written=tuple(written),
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TemplateError as error:
            msg = f"the chat template refuses prompt {self._name!r}: {error}; {_ELSE}."
            raise InputError(msg) from error

    def _gaps(self, frame: str, count: int) -> list[str]:
        """Return the template's text before, between and after ``count`` marks."""
        gaps = []
        for n in range(count):
            before, found, frame = frame.partition(self.mark(n))
            if not found or self.mark(n) in frame:
                self._refuse("drops, moves or repeats", n)
            gaps.append(before)
        return [*gaps, frame]

    def _shown(self, rest: str, before: str, content: str, after: str, n: int) -> str:
        """Return the content as the template shows it at the head of ``rest``: whole or stripped."""
        for shown in (content, content.strip(), content.lstrip(), content.rstrip()):
            if rest.startswith(before + shown + after):
                return shown
        return self._refuse("rewrites", n)

    def _close(self, messages: list[Message], gap: str) -> str:
        """Return the part of the text after a message that closes its turn.

        It is what the template writes after the last of these messages when none follows. If it
        cannot render them alone, or renders them otherwise, the next turn gets all of the gap.
        """
        try:
            close = self.apply(messages, answer=False).partition(messages[-1].content)[2]
        except TemplateError:
            return ""
        return close if gap.startswith(close) else ""

    def _refuse(self, verb: str, n: int) -> NoReturn:
        msg = f"the chat template {verb} message {n + 1} of prompt {self._name!r}; {_ELSE}."
        raise InputError(msg)
