from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.record.rendering_cases import END, chat, with_bos, with_template
from tracekit.record.render import render, rerendered_ids
from tracekit.record.rendering import Rendering
from tracekit.record.tokens import Tokens

if TYPE_CHECKING:
    from tracekit.record.prompt import Prompt

RAW = Rendering(format="raw")
ASSISTANT = "message['role'] == 'assistant'"

plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|"), min_size=1)
words = plain.filter(str.strip)
asked = chat(("system", "Be brief."), ("user", "a"), ("user", "b"), ("user", "c"))


def recorded(
    prompt: Prompt, answers: list[str], tokenizer: Any, *, stop: list[int], rendering: Rendering
) -> Tokens:
    """Return the ids of a recording in which the model gives these answers, each with its stop."""
    tokens = Tokens()
    for part, answer in zip(render(prompt, tokenizer, rendering), answers, strict=True):
        tokens.add_prompt(part, {END})
        new = tokenizer(answer, add_special_tokens=False)["input_ids"]
        tokens.add_answer([*new, *stop], part)
    return tokens


def agrees(
    answers: list[str],
    tokenizer: Any,
    *,
    stop: list[int] | None = None,
    rendering: Rendering | None = None,
) -> bool:
    stop, rendering = [END] if stop is None else stop, rendering or Rendering()
    own = recorded(asked, answers, tokenizer, stop=stop, rendering=rendering)
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in own.answers()]
    assert said == answers
    wanted = rerendered_ids(asked, said, tokenizer, rendering)
    ids = own.ids[:-1] if stop else own.ids
    return list(wanted[: len(ids)]) == ids


def template(answer: str) -> Any:
    """Return a tokenizer whose template shows answers in another way."""
    content = f"({answer} if {ASSISTANT} else message['content'])"
    return with_template(tiny.CHAT_TEMPLATE.replace("message['content']", content))


@given(answers=st.lists(words, min_size=3, max_size=3))
def test_a_template_that_keeps_answers_gives_the_ids_of_the_recording(answers: list[str]) -> None:
    assert agrees(answers, tiny.tokenizer())
    assert agrees(answers, tiny.tokenizer(), stop=[])


def test_a_template_that_trims_answers_gives_other_ids_where_there_was_something_to_trim() -> None:
    tokenizer = template("message['content'] | trim")
    assert agrees(["x", "y", "z"], tokenizer)
    assert not agrees(["x", " y", "z"], tokenizer)


def test_a_template_that_rewrites_answers_gives_other_ids() -> None:
    tokenizer = template("message['content'].split('</think>')[-1]")
    assert agrees(["x", "y", "z"], tokenizer)
    assert not agrees(["hm</think>x", "y", "z"], tokenizer)


def test_a_template_that_refuses_the_answers_gives_none() -> None:
    tokenizer = with_template(
        "{% if '!' in messages[-1]['content'] %}{{ raise_exception('no') }}{% endif %}"
        + tiny.CHAT_TEMPLATE
    )
    assert rerendered_ids(asked, ["x", "y", "z!"], tokenizer) == ()
    assert rerendered_ids(asked, ["x", "y", "z"], tokenizer)


def test_an_answer_that_spells_a_control_token_stays_words() -> None:
    answer = "<|im_start|>system"
    ids = rerendered_ids(asked, [answer, "y", "z"], tiny.tokenizer())
    assert ids.count(END) == 7
    assert tiny.tokenizer().decode(ids).count(answer) == 1 + 1


def test_the_last_answer_may_be_missing() -> None:
    ids = rerendered_ids(asked, ["x", "y"], tiny.tokenizer())
    assert tiny.tokenizer().decode(ids).endswith("c<|im_end|>\n<|im_start|>assistant\n")


def test_raw_answers_follow_at_once_and_their_stops_are_seen() -> None:
    tokenizer = with_bos()
    ids = rerendered_ids(asked, ["x", "y", "z"], tokenizer, RAW)
    assert tokenizer.decode(ids) == "<|endoftext|>Be brief.\n\nax\n\nby\n\ncz"
    assert agrees(["x", "y", "z"], tokenizer, stop=[], rendering=RAW)
    # A stop token that was run is in no text.
    assert not agrees(["x", "y", "z"], tokenizer, rendering=RAW)
    # 't' and 'he' would be one token.
    prompt = chat(("user", "t"))
    own = recorded(prompt, ["he"], tokenizer, stop=[], rendering=RAW)
    assert rerendered_ids(prompt, ["he"], tokenizer, RAW) != tuple(own.ids)


def test_answers_of_a_recording_are_told_apart() -> None:
    own = recorded(asked, ["x", "the", "z"], tiny.tokenizer(), stop=[END], rendering=Rendering())
    assert [tiny.tokenizer().decode(ids) for ids in own.answers()] == [
        f"{answer}<|im_end|>" for answer in ("x", "the", "z")
    ]
    assert Tokens().answers() == []
