"""From a prompt to token ids, without losing which token stands for what.

The chat template is rendered as text and tokenised once. Where its messages stand is learned from
a second rendering in which every message is a mark: what surrounds the marks is the template's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from jinja2 import TemplateError

from tracekit.errors import InputError, ModelError
from tracekit.record.prompt import Message, join

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tracekit.record.prompt import Prompt

_Token = tuple[int, int, int]
"""An id, with the first character and the end of what it stands for."""

_SPANS = (None, "context", "question", "needle", "answer")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """What the model reads before one of its answers.

    The first of a prompt is everything up to the first answer; a later one is what comes after
    the answer before it: the close of the assistant's turn, the user's next message, the opening
    of the next answer. Its ids are appended to those that are there. **If that answer ended with
    the end-of-turn token, its last id equals ``ids[0]`` here, and only one of them is kept.**

    Parameters
    ----------
    ids
        T token ids.
    roles
        Whose turn a token belongs to: system, user, assistant; None in raw text. The template's
        tokens around a message belong to its turn, the opening of an answer to the answer's.
    turns
        Number of that turn, 0 first, answers counted.
    is_template
        Whether a token is the template's (or, in raw text, added by the tokenizer).
    spans
        context, question, needle, answer, or None. The blank line before a question is its own.
    context_end
        Tokens that lie wholly before the question; None without context.
    turn_ends
        Tokens up to the end of each turn that ends here, counted from ``ids[0]``.
    answer_turn
        Number of the answer to come (of the text itself, where it is raw).
    text
        The characters that were tokenised.

    Notes
    -----
    A token over a border belongs to the side where most of its characters are, at a tie to the
    earlier one.
    """

    ids: tuple[int, ...]
    roles: tuple[str | None, ...]
    turns: tuple[int, ...]
    is_template: tuple[bool, ...]
    spans: tuple[str | None, ...]
    context_end: int | None
    turn_ends: tuple[int, ...]
    answer_turn: int
    text: str


@dataclass(frozen=True)
class _Written:
    """A message in a text: its turn, the range where it is shown, and its content as given."""

    turn: int
    start: int
    end: int
    content: str


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """A text with the ends of its turns, the first of which is ``first_turn``, and its messages."""

    text: str
    first_turn: int
    roles: tuple[str | None, ...]
    turn_ends: tuple[int, ...]
    written: tuple[_Written, ...]


def render(prompt: Prompt, tokenizer: Any) -> list[Rendered]:
    """Return what the model reads, one part an answer.

    Parameters
    ----------
    prompt
        Messages go through the tokenizer's chat template; there, the strings of special tokens in
        a message stay plain words. Raw text is tokenised by the tokenizer's own rules, in which
        they are special tokens.
    tokenizer
        A fast tokenizer of transformers (one that knows character offsets).

    Raises
    ------
    InputError
        If there is no chat template for messages, if it refuses, drops or rewrites them, or if
        nothing is left to read.
    ModelError
        If the tokenizer knows no character offsets.
    """
    if not tokenizer.is_fast:
        msg = "the tokenizer gives no character offsets; use a fast tokenizer (tokenizer.json)."
        raise ModelError(msg)
    try:
        return [_tokenise(prompt, layout, tokenizer) for layout in _layouts(prompt, tokenizer)]
    except TemplateError as error:
        msg = f"the chat template refuses prompt {prompt.id!r}: {error}; give 'text' instead."
        raise InputError(msg) from error


def _layouts(prompt: Prompt, tokenizer: Any) -> Iterator[_Layout]:
    """Yield the text before each answer; answers before it are marks, and cut off."""
    if prompt.messages is None:
        text = prompt.text or ""
        whole = _Written(0, 0, len(text), text)
        yield _Layout(text=text, first_turn=0, roles=(None,), turn_ends=(), written=(whole,))
        return
    if not tokenizer.chat_template:
        msg = (
            f"prompt {prompt.id!r} has messages, but the tokenizer has no chat template; "
            "give 'text' instead."
        )
        raise InputError(msg)
    chat = _Chat(prompt, tokenizer)
    said: list[Message] = []
    answered = None
    following = [*(message.role for message in prompt.messages[1:]), "user"]
    for message, next_role in zip(prompt.messages, following, strict=True):
        said.append(message)
        if message.role == next_role == "user":
            layout = chat.lay_out(said)
            yield layout if answered is None else _after(layout, answered)
            answered = len(said)
            said.append(Message(role="assistant", content=chat.mark(answered)))


def _after(layout: _Layout, answered: int) -> _Layout:
    """Return what follows the answer that is turn ``answered``."""
    cut = layout.written[answered].end
    return _Layout(
        text=layout.text[cut:],
        first_turn=answered,
        roles=layout.roles[answered:],
        turn_ends=tuple(end - cut for end in layout.turn_ends[answered:]),
        written=tuple(
            replace(message, start=message.start - cut, end=message.end - cut)
            for message in layout.written[answered + 1 :]
        ),
    )


class _Chat:
    """A tokenizer's chat template over the messages of one prompt."""

    def __init__(self, prompt: Prompt, tokenizer: Any) -> None:
        self._id = prompt.id
        self._tokenizer = tokenizer
        stem, texts = "Mark", [message.content for message in prompt.messages or ()]
        while any(stem in text for text in texts):
            stem += "Mark"
        self._stem = stem

    def mark(self, number: int) -> str:
        """Return the words that stand for message ``number``: in no message, none inside another."""
        return f"{self._stem}{number}End"

    def lay_out(self, messages: list[Message]) -> _Layout:
        """Return the rendered messages with the opening of an answer, and where each one stands."""
        marked = [replace(m, content=self.mark(n)) for n, m in enumerate(messages)]
        gaps = self._gaps(self._apply(marked), len(marked))
        text = self._apply(messages)
        end, turn_ends, written = 0, [], []
        for n, message in enumerate(messages):
            shown = self._shown(text[end:], gaps[n], message.content, gaps[n + 1], n)
            start = end + len(gaps[n])
            end = start + len(shown)
            written.append(_Written(n, start, end, message.content))
            turn_ends.append(end + len(self._close(marked[: n + 1], gaps[n + 1])))
        if end + len(gaps[-1]) != len(text):
            self._refuse("rewrites", len(messages) - 1)
        return _Layout(
            text=text,
            first_turn=0,
            roles=(*(message.role for message in messages), "assistant"),
            turn_ends=tuple(turn_ends),
            written=tuple(written),
        )

    def _apply(self, messages: list[Message], *, answer: bool = True) -> str:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return str(
            self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer)
        )

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
            close = self._apply(messages, answer=False).partition(messages[-1].content)[2]
        except TemplateError:
            return ""
        return close if gap.startswith(close) else ""

    def _refuse(self, verb: str, n: int) -> NoReturn:
        msg = (
            f"the chat template {verb} message {n + 1} of prompt {self._id!r}; give 'text' instead."
        )
        raise InputError(msg)


def _tokenise(prompt: Prompt, layout: _Layout, tokenizer: Any) -> Rendered:
    """Return the tokens of a text, each with what most of its characters are."""
    size = len(layout.text)
    is_template_C = np.ones(size, dtype=np.int64)
    for message in layout.written:
        is_template_C[message.start : message.end] = 0
    turn_C = np.searchsorted(layout.turn_ends, np.arange(size), side="right")
    span_C, question_start = _paint_spans(prompt, layout)
    if prompt.messages is None:
        tokens = _call(tokenizer, layout.text)
    else:
        tokens = _encode_chat(layout.text, is_template_C == 0, tokenizer)
    if not tokens:
        msg = f"prompt {prompt.id!r} has a part without tokens; give it some text."
        raise InputError(msg)
    bounds = _bounds(tokens)
    turn_T = _majority(turn_C, bounds)
    return Rendered(
        ids=tuple(token for token, _, _ in tokens),
        roles=tuple(layout.roles[turn] for turn in turn_T),
        turns=tuple(layout.first_turn + turn for turn in turn_T),
        # A token of no character was added by the tokenizer.
        is_template=tuple(
            start == end or bool(flag)
            for flag, (start, end) in zip(_majority(is_template_C, bounds), bounds, strict=True)
        ),
        spans=tuple(_SPANS[span] for span in _majority(span_C, bounds)),
        context_end=(
            None if question_start is None else sum(end <= question_start for _, end in bounds)
        ),
        turn_ends=tuple(bisect_right(turn_T, turn) for turn in range(len(layout.turn_ends))),
        answer_turn=layout.first_turn + len(layout.turn_ends),
        text=layout.text,
    )


def _paint_spans(prompt: Prompt, layout: _Layout) -> tuple[NDArray[np.int64], int | None]:
    """Return the number of each character's span, and where the question begins."""
    span_C = np.zeros(len(layout.text), dtype=np.int64)
    question_start = None
    for message in layout.written:
        # The template may have stripped the message: ranges of the content start here.
        origin = message.start - message.content.find(layout.text[message.start : message.end])
        for kind, low, high in _ranges(prompt, message.content):
            low, high = max(origin + low, message.start), min(origin + high, message.end)
            span_C[low:high] = _SPANS.index(kind)
            question_start = low if kind == "question" else question_start
    return span_C, question_start


def _ranges(prompt: Prompt, content: str) -> Iterator[tuple[str, int, int]]:
    """Yield the spans of a message: kind, first character, end."""
    if prompt.context is not None and content == join(prompt.context, prompt.question or ""):
        yield "context", 0, len(prompt.context)
        yield "question", len(prompt.context), len(content)
    for span in prompt.spans:
        if (low := content.find(span.text)) >= 0:
            yield span.kind, low, low + len(span.text)


def _encode_chat(text: str, is_written_C: NDArray[np.bool_], tokenizer: Any) -> list[_Token]:
    """Return the tokens of a chat; control tokens come from the template, never from a message.

    The whole is tokenised at once. Where a message spells a special token, the stretch between the
    template's own control tokens around it is tokenised again as plain words: tokenizers cut at
    control tokens before all else, so that the rest keeps its ids.
    """
    tokens = _call(tokenizer, text, add_special_tokens=False)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = [n for n, (token, _, _) in enumerate(tokens) if token in special]
    forged = [n for n in found if is_written_C[tokens[n][1]]]
    real = sorted(set(found) - set(forged))
    for left, right in reversed(list(pairwise([-1, *real, len(tokens)]))):
        if any(left < n < right for n in forged):
            low = tokens[left][2] if left >= 0 else 0
            high = tokens[right][1] if right < len(tokens) else len(text)
            plain = _call(
                tokenizer, text[low:high], add_special_tokens=False, split_special_tokens=True
            )
            tokens[left + 1 : right] = [(i, low + start, low + end) for i, start, end in plain]
    return tokens


def _call(tokenizer: Any, text: str, **how: bool) -> list[_Token]:
    made = tokenizer(text, return_offsets_mapping=True, verbose=False, **how)
    pairs = zip(made["input_ids"], made["offset_mapping"], strict=True)
    return [(token, start, end) for token, (start, end) in pairs]


def _bounds(tokens: list[_Token]) -> list[tuple[int, int]]:
    """Return the characters of each token, white space that the tokenizer trimmed given back."""
    bounds, reached = [], 0
    for _, start, end in tokens:
        is_added = start == end <= reached
        bounds.append((reached, reached) if is_added else (min(start, reached), end))
        reached = max(reached, end)
    return bounds


def _majority(value_C: NDArray[np.int64], bounds: list[tuple[int, int]]) -> list[int]:
    """Return each token's most frequent value, at a tie the one that comes first."""
    values = value_C.tolist()
    last = len(values) - 1
    chars = (values[min(start, last) : max(end, start + 1)] for start, end in bounds)
    return [Counter(part).most_common(1)[0][0] for part in chars]
