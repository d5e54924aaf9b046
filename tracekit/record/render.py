"""From a prompt or a conversation to what the model reads."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from tracekit.errors import InputError
from tracekit.record.chat import Chat
from tracekit.record.encode import accept_tokenizer, encode_chat, encode_more, encode_raw
from tracekit.record.layout import joined_layout, plain_layout
from tracekit.record.prompt import Message
from tracekit.record.rendered import label
from tracekit.record.rendering import DEFAULT_RENDERING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.record.encode import Token
    from tracekit.record.layout import Layout
    from tracekit.record.prompt import Conversation, Prompt
    from tracekit.record.rendered import Rendered
    from tracekit.record.rendering import Rendering


def render(
    prompt: Prompt,
    tokenizer: Any,
    rendering: Rendering = DEFAULT_RENDERING,
) -> list[Rendered]:
    """Return what the model reads, one part an answer.

    Parameters
    ----------
    prompt
        Through the tokenizer's chat template, or raw, as ``rendering`` says. A raw text gets what
        the tokenizer puts before it (a BOS), a chat what its template writes.
    tokenizer
        A fast tokenizer of transformers (one that knows character offsets).
    rendering
        Chat template or not, special tokens in messages or not.

    Raises
    ------
    InputError
        If there is no chat template for messages, if it refuses, drops or rewrites them, or if
        nothing is left to read.
    ModelError
        If the tokenizer knows no character offsets.
    """
    accept_tokenizer(tokenizer)
    rendering.accept(tokenizer)
    return [
        label(prompt.id, layout, tokens, prompt.marked)
        for layout, tokens in _parts(prompt, tokenizer, rendering)
    ]


def render_conversation(
    conversation: Conversation, tokenizer: Any, rendering: Rendering
) -> Rendered:
    """Return a conversation as the model reads it: whole, no answer opened after it.

    Raises
    ------
    InputError, ModelError
        As ``render``.
    """
    accept_tokenizer(tokenizer)
    rendering.accept(tokenizer)
    messages = conversation.messages
    if rendering.format == "raw":
        layout = joined_layout(messages)
        tokens = _encode_first(layout.text, tokenizer, rendering)
    else:
        chat = Chat(conversation.id, messages, tokenizer)
        layout = chat.lay_out(messages, answer=False)
        tokens = _encode_chat(layout, tokenizer, rendering)
    return label(conversation.id, layout, tokens)


def rerendered_ids(
    prompt: Prompt,
    answers: Sequence[str],
    tokenizer: Any,
    rendering: Rendering = DEFAULT_RENDERING,
) -> tuple[int, ...]:
    """Return the ids of a prompt with its answers in place, rendered and tokenised in one go.

    A recording appends ids and never tokenises again: where its ids differ from these (what closes
    the last answer aside), another program that renders the conversation anew reads other ids.

    Parameters
    ----------
    prompt
        As for ``render``.
    answers
        One a part, in order, special tokens left out; the last may be missing.
    tokenizer, rendering
        As for ``render``.

    Returns
    -------
    tuple of int
        None at all if the template refuses these answers.

    Raises
    ------
    InputError
        If there is no chat template for messages.
    """
    messages = _chat_messages(prompt, rendering)
    if messages is None:
        parts = (layout.text for layout in _raw_layouts(prompt))
        text = "".join(part + said for part, said in zip_longest(parts, answers, fillvalue=""))
        return _ids(_encode_first(text, tokenizer, rendering))
    said: list[Message] = []
    for messages_before, answer in zip_longest(_rounds(messages), answers):
        said += messages_before
        said += [] if answer is None else [Message(role="assistant", content=answer)]
    chat, is_open = Chat(prompt.id, said, tokenizer), said[-1].role == "user"
    try:
        return _ids(_encode_chat(chat.lay_out(said, answer=is_open), tokenizer, rendering))
    except InputError:
        # The template rewrites an answer, so that nobody knows where it stands, or refuses it.
        try:
            text = chat.apply(said, answer=is_open)
        except TemplateError:
            return ()
        return _ids(encode_more(text, tokenizer, is_literal=False))


def _chat_messages(prompt: Prompt, rendering: Rendering) -> tuple[Message, ...] | None:
    """Return the messages that go through a chat template; None: the prompt is raw."""
    if rendering.format == "raw":
        return None
    if rendering.format == "chat" and prompt.text is not None:
        return (Message(role="user", content=prompt.text),)
    return prompt.messages


def _parts(
    prompt: Prompt, tokenizer: Any, rendering: Rendering
) -> Iterator[tuple[Layout, list[Token]]]:
    """Yield what stands before each answer, and its tokens."""
    messages = _chat_messages(prompt, rendering)
    if messages is not None:
        for layout in _chat_layouts(prompt.id, messages, tokenizer):
            yield layout, _encode_chat(layout, tokenizer, rendering)
        return
    first, *later = _raw_layouts(prompt)
    yield first, _encode_first(first.text, tokenizer, rendering)
    for layout in later:
        yield layout, encode_more(layout.text, tokenizer, is_literal=rendering.is_literal)


def _rounds(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages before each answer: one comes after a user's that no reply follows."""
    rounds: list[list[Message]] = [[]]
    for message, after in zip_longest(messages, messages[1:]):
        rounds[-1].append(message)
        if message.role == "user" and after is not None and after.role == "user":
            rounds.append([])
    return rounds


def _chat_layouts(name: str, messages: Sequence[Message], tokenizer: Any) -> Iterator[Layout]:
    """Yield the text before each answer; answers before it are marks, and cut off."""
    chat = Chat(name, messages, tokenizer)
    said: list[Message] = []
    answered = None
    for messages_before in _rounds(messages):
        said += messages_before
        layout = chat.lay_out(said, answer=True)
        yield layout if answered is None else layout.after(answered)
        answered = len(said)
        said.append(Message(role="assistant", content=chat.mark(answered)))


def _raw_layouts(prompt: Prompt) -> Iterator[Layout]:
    """Yield the text before each answer, without a template."""
    if prompt.messages is None:
        yield plain_layout(prompt.text or "")
        return
    turn = 0
    for messages_before in _rounds(prompt.messages):
        layout = joined_layout(messages_before, turn)
        yield layout
        turn += len(layout.turn_ends)


def _encode_first(text: str, tokenizer: Any, rendering: Rendering) -> list[Token]:
    before, own = encode_raw(text, tokenizer, is_literal=rendering.is_literal)
    return before + own


def _encode_chat(layout: Layout, tokenizer: Any, rendering: Rendering) -> list[Token]:
    return encode_chat(
        layout.text, layout.is_written_C(), tokenizer, is_literal=rendering.is_literal
    )


def _ids(tokens: list[Token]) -> tuple[int, ...]:
    return tuple(token for token, _, _ in tokens)
