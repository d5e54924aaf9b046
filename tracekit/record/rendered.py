"""Tokens with what they stand for: whose turn, template or message, which marked span."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import InputError
from tracekit.record.encode import bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from tracekit.record.encode import Token
    from tracekit.record.layout import Layout
    from tracekit.record.prompt import Mark

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
        Whose turn a token belongs to: system, user, assistant; None in a text without messages.
        The template's tokens around a message belong to its turn, the opening of an answer to the
        answer's.
    turns
        Number of that turn, 0 first, answers counted.
    is_template
        Whether a token is the template's (without one: added by the tokenizer, or a blank line
        between messages).
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


def label(
    name: str,
    layout: Layout,
    tokens: list[Token],
    marked: Callable[[str], Iterable[Mark]] = lambda _: (),
) -> Rendered:
    """Return the tokens of a text, each with what most of its characters are.

    Parameters
    ----------
    name
        Of the prompt, for errors.
    layout
        The text.
    tokens
        All of them, in order.
    marked
        From the content of a message to its marked spans.

    Raises
    ------
    InputError
        If there are no tokens.
    """
    if not tokens:
        msg = f"prompt {name!r} has a part without tokens; give it some text."
        raise InputError(msg)
    span_C, question_start = _paint_spans(layout, marked)
    is_template_C = (~layout.is_written_C()).astype(np.int64)
    turn_C = np.searchsorted(layout.turn_ends, np.arange(len(layout.text)), side="right")
    bounds_T = bounds(tokens)
    turn_T = _majority(turn_C, bounds_T)
    return Rendered(
        ids=tuple(token for token, _, _ in tokens),
        roles=tuple(layout.roles[turn] for turn in turn_T),
        turns=tuple(layout.first_turn + turn for turn in turn_T),
        # A token of no character was added by the tokenizer.
        is_template=tuple(
            start == end or bool(flag)
            for flag, (start, end) in zip(_majority(is_template_C, bounds_T), bounds_T, strict=True)
        ),
        spans=tuple(_SPANS[span] for span in _majority(span_C, bounds_T)),
        context_end=(
            None if question_start is None else sum(end <= question_start for _, end in bounds_T)
        ),
        turn_ends=tuple(bisect_right(turn_T, turn) for turn in range(len(layout.turn_ends))),
        answer_turn=layout.first_turn + len(layout.turn_ends),
        text=layout.text,
    )


def _paint_spans(
    layout: Layout, marked: Callable[[str], Iterable[Mark]]
) -> tuple[NDArray[np.int64], int | None]:
    """Return the number of each character's span, and where the question begins."""
    span_C = np.zeros(len(layout.text), dtype=np.int64)
    question_start = None
    for message in layout.written:
        # The template may have stripped the message: ranges of the content start here.
        origin = message.start - message.content.find(layout.text[message.start : message.end])
        for kind, low, high in marked(message.content):
            low, high = max(origin + low, message.start), min(origin + high, message.end)
            span_C[low:high] = _SPANS.index(kind)
            question_start = low if kind == "question" else question_start
    return span_C, question_start


def _majority(value_C: NDArray[np.int64], bounds_T: list[tuple[int, int]]) -> list[int]:
    """Return each token's most frequent value, at a tie the one that comes first."""
    values = value_C.tolist()
    last = len(values) - 1
    chars = (values[min(start, last) : max(end, start + 1)] for start, end in bounds_T)
    return [Counter(part).most_common(1)[0][0] for part in chars]
