from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.record.rendering_cases import BOS, END, START, chat, said, with_bos, with_template
from tracekit.errors import InputError, UsageError
from tracekit.record.prompt import Conversation, MarkedSpan, Message, Prompt, join
from tracekit.record.render import render, render_conversation
from tracekit.record.rendering import Rendering

RAW = Rendering(format="raw")
PARSE = Rendering(special_tokens="parse")

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


def text(content: str) -> Prompt:
    return Prompt(id="p", domain="d", text=content)


@pytest.mark.parametrize("changes", [{"format": "chta"}, {"special_tokens": "none"}])
def test_an_unknown_rendering_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="unknown"):
        Rendering(**changes)


def test_raw_messages_are_joined_by_blank_lines_and_answered_one_by_one() -> None:
    prompt = chat(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d"))
    parts = render(prompt, with_template(None), RAW)
    assert [part.text for part in parts] == ["s\n\na\n\nb\n\nc", "\n\nd"]
    first, second = parts
    assert (first.roles[0], first.roles[-1]) == ("system", "user")
    assert sorted(set(first.turns)) == [0, 1, 2, 3]
    assert (first.answer_turn, first.turn_ends[-1]) == (4, len(first.ids))
    assert set(second.turns) == {5}
    assert second.answer_turn == 6
    # The answer ends where it ends: nothing closes it.
    assert second.turn_ends == (0, len(second.ids))
    assert second.is_template == (True, True, False)


def test_raw_prompts_of_one_message_are_the_message() -> None:
    raw = render(chat(("user", "in the")), tiny.tokenizer(), RAW)
    (as_text,) = render(text("in the"), tiny.tokenizer())
    assert raw[0].ids == as_text.ids
    assert (set(raw[0].roles), set(as_text.roles)) == ({"user"}, {None})


def test_raw_messages_keep_their_spans() -> None:
    context, question = "The code is 47.", "Which?"
    spans = (MarkedSpan(kind="answer", text="47"),)
    more: dict[str, Any] = {"context": context, "question": question, "spans": spans}
    prompt = chat(("system", "s"), ("user", join(context, question)), **more)
    (part,) = render(prompt, tiny.tokenizer(), RAW)
    chosen = dict.fromkeys((None, "context", "question", "answer"), "")
    for token, span in zip(part.ids, part.spans, strict=True):
        chosen[span] += tiny.tokenizer().decode([token])
    expected = {None: "s\n\n", "context": "The code is .", "question": "\n\nWhich?", "answer": "47"}
    assert chosen == expected
    assert part.context_end == part.spans.index("question")


def test_chat_puts_a_text_into_a_user_message() -> None:
    rendering = Rendering(format="chat")
    assert render(text("in"), tiny.tokenizer(), rendering) == render(
        chat(("user", "in")), tiny.tokenizer()
    )


@pytest.mark.parametrize("prompt", [text("in"), chat(("user", "in"))])
def test_chat_without_a_template_is_refused(prompt: Prompt) -> None:
    with pytest.raises(InputError, match="--raw"):
        render(prompt, with_template(None), Rendering(format="chat"))


# Special tokens ----------------------------------------------------------------------------------


@given(content=words)
def test_literal_text_has_no_special_token_but_the_one_before_it(content: str) -> None:
    content = f"{content}<|im_end|><|endoftext|>{content}"
    (part,) = render(text(content), with_bos())
    assert part.ids[0] == BOS
    assert not set(part.ids[1:]) & {BOS, START, END}
    assert tiny.tokenizer().decode(part.ids[1:]) == content


@pytest.mark.parametrize("start", ["", "<|endoftext|>", "<|endoftext|><|endoftext|>"])
@pytest.mark.parametrize("after", ["", "<|im_end|>"])
def test_parsed_text_never_begins_with_two_bos(start: str, after: str) -> None:
    (part,) = render(text(f"{start}in the"), with_bos(after=after), PARSE)
    assert tiny.tokenizer().decode(part.ids) == "<|endoftext|>in the"


def test_a_bos_that_the_tokenizer_does_not_own_up_to_is_not_doubled_either() -> None:
    tokenizer = with_bos()
    tokenizer.bos_token = None
    (part,) = render(text("<|endoftext|>in the"), tokenizer, PARSE)
    assert tiny.tokenizer().decode(part.ids) == "<|endoftext|>in the"


def test_a_template_that_writes_a_bos_gives_one() -> None:
    tokenizer = with_bos()
    tokenizer.chat_template = "{{ bos_token }}" + tiny.CHAT_TEMPLATE
    for part in render(chat(("user", "in")), tokenizer):
        assert part.ids[:2] == (BOS, START)
    tokenizer.chat_template = "{{ bos_token + messages[0]['content'] }}"
    prompt = chat(("user", "<|endoftext|>in"))
    (part,) = render(prompt, tokenizer, PARSE)
    assert tokenizer.decode(part.ids) == "<|endoftext|>in"
    (part,) = render(prompt, tokenizer)
    assert tokenizer.decode(part.ids) == "<|endoftext|><|endoftext|>in"
    assert part.ids.count(BOS) == 1


def test_later_raw_parts_have_no_bos() -> None:
    first, second = render(chat(("user", "in"), ("user", "the")), with_bos(), RAW)
    assert first.ids[0] == BOS
    assert BOS not in second.ids
    assert first.is_template[0]


def test_parsed_messages_make_control_tokens() -> None:
    (part,) = render(chat(("user", "a<|im_end|>")), tiny.tokenizer(), PARSE)
    assert part.ids.count(END) == 2


# Conversations -----------------------------------------------------------------------------------


def test_a_conversation_is_rendered_whole_and_opens_no_answer() -> None:
    messages = said(("system", "s"), ("user", "a"), ("assistant", "b"))
    part = render_conversation(Conversation(id="c", domain="d", messages=messages), _tiny(), RAW)
    assert (part.text, part.turn_ends[-1]) == ("s\n\na\n\nb", len(part.ids))
    part = render_conversation(
        Conversation(id="c", domain="d", messages=messages), _tiny(), Rendering()
    )
    assert part.text == _tiny().apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages], tokenize=False
    )
    assert list(part.ids) == _tiny()(part.text).input_ids
    assert len(part.turn_ends) == 3
    assert part.turn_ends[-1] == len(part.ids)
    assert [part.turns[end - 1] for end in part.turn_ends] == [0, 1, 2]
    assert part.roles[-1] == "assistant"


@given(contents=st.lists(words, min_size=1, max_size=4), data=st.data())
def test_every_message_of_a_conversation_comes_back(
    contents: list[str], data: st.DataObject
) -> None:
    roles = data.draw(st.tuples(*[st.sampled_from(["user", "assistant"])] * len(contents)))
    messages = said(*zip(roles, contents, strict=True))
    conversation = Conversation(id="c", domain="d", messages=messages)
    part = render_conversation(conversation, _tiny(), Rendering())
    groups: dict[int, list[int]] = {n: [] for n in range(len(contents))}
    for token, turn, is_template in zip(part.ids, part.turns, part.is_template, strict=True):
        if not is_template:
            groups[turn].append(token)
    assert [_tiny().decode(groups[n]) for n in range(len(contents))] == contents
    assert [message.role for message in messages] == [
        part.roles[part.turns.index(n)] for n in range(len(contents))
    ]


@pytest.mark.parametrize("roles", ["", "system", "user system", "tool user"])
def test_a_conversation_out_of_order_is_refused(roles: str) -> None:
    messages = tuple(Message(role=role, content="x") for role in roles.split())
    with pytest.raises(InputError, match="messages must be"):
        Conversation(id="c", domain="d", messages=messages)


def _tiny() -> Any:
    return tiny.tokenizer()
