from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import InputError
from tracekit.record import prompts as module
from tracekit.record.prompt import MarkedSpan, Message, Prompt
from tracekit.record.prompts import PromptFile, read_prompts

if TYPE_CHECKING:
    from pathlib import Path

DOMAINS = ["story", "article", "dialogue", "summary", "explanation"]
DOMAINS += ["translation", "code", "reasoning", "retrieval", "instruction"]


def read(tmp_path: Path, content: str | bytes, name: str = "some.txt") -> PromptFile:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(str(path))


def read_json(tmp_path: Path, *lines: object) -> PromptFile:
    good = {"id": "good", "prompt": "Hello"}
    content = "\n".join(json.dumps(line) for line in (good, *lines))
    return read(tmp_path, content, "some.jsonl")


def user(*texts: str) -> tuple[Message, ...]:
    return tuple(Message(role="user", content=text) for text in texts)


def test_plain_lines_are_one_prompt_each_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = read(tmp_path, "Why is the sky blue?\n\n   \n[INST] Say 'hi' {now}\n")
    assert [(p.id, p.domain, p.messages) for p in file.prompts] == [
        ("line-0001", "general", user("Why is the sky blue?")),
        ("line-0004", "general", user("[INST] Say 'hi' {now}")),
    ]
    assert file.bad == ()


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_byte_order_mark_and_line_ends_change_nothing(
    tmp_path: Path, bom: bytes, end: bytes, name: str
) -> None:
    texts = ["one", "zwei \u4e16"]
    lines = [json.dumps({"prompt": t}) if name == "a.jsonl" else t for t in texts]
    content = bom + b"".join(line.encode() + end for line in lines)
    file = read(tmp_path, content, name)
    assert [p.messages for p in file.prompts] == [user(text) for text in texts]
    assert file.sha256 == hashlib.sha256(content).hexdigest()


def test_an_unnamed_file_is_json_if_its_first_line_is_an_object(tmp_path: Path) -> None:
    file = read(tmp_path, '\n {"prompt": "a"}\nnot json\n', "prompts")
    assert [p.id for p in file.prompts] == ["line-0002"]
    assert [bad.line for bad in file.bad] == [3]


def test_every_body_gives_its_messages(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    file = read_json(
        tmp_path,
        {"messages": chat},
        {"text": "Once upon", "id": 7, "domain": "story", "max_new_tokens": 5},
        {"context": "The cat is red.", "question": "Which?", "system": "Be brief."},
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": None},
    )
    _, messages, text, context, turns = file.prompts
    assert messages.messages == tuple(Message(**item) for item in chat)
    assert (text.id, text.domain, text.text, text.messages) == ("7", "story", "Once upon", None)
    assert text.max_new_tokens == 5
    system = Message(role="system", content="Be brief.")
    assert context.messages == (system, *user("The cat is red.\n\nWhich?"))
    assert (context.context, context.question) == ("The cat is red.", "Which?")
    assert (turns.id, turns.domain, turns.messages) == ("81", "writing", user("a", "b"))


def test_spans_and_checks_are_kept(tmp_path: Path) -> None:
    check = {"kind": "number", "value": 3, "answers": "each"}
    line = {"prompt": "The code is 3.", "spans": [{"kind": "answer", "text": "3"}], "check": check}
    prompt = read_json(tmp_path, line).prompts[1]
    assert prompt.spans == (MarkedSpan(kind="answer", text="3"),)
    assert prompt.check == check


CHAT = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"prompt": "  "}, "empty"),
        ({"text": ""}, "empty"),
        ({"turns": []}, "none"),
        ({"turns": ["a", 3]}, "turn 2 must be str, not int"),
        ({"messages": [CHAT, "b"]}, "role and content"),
        ({"messages": [{"role": "user"}]}, "content must be str, not NoneType"),
        ({"messages": [CHAT, {"role": "assistant", "content": "b"}]}, "user assistant"),
        ({"messages": [{"role": "tool", "content": "b"}, CHAT]}, "tool user"),
        ({"messages": [CHAT], "system": "s"}, "system does not go with messages"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"id": "x\udc00", "prompt": "a"}, "lone surrogate"),
        ({"prompt": 3}, "prompt must be str, not int"),
        ({"prompt": "a", "max_new_tokens": True}, "max_new_tokens must be int, not bool"),
        ({"prompt": "a", "max_new_tokens": 0}, "at least 1"),
        ({"prompt": "a", "text": "b"}, "has prompt, text"),
        ({"context": "a"}, "has context"),
        ({"prompt": "a", "question": "b"}, "has prompt, question"),
        ({"context": " ", "question": "b"}, "the context is empty"),
        ({}, "has none"),
        ([], "must be a JSON object, not list"),
        ({"id": "good", "prompt": "again"}, "'good' is taken"),
        ({"id": " ", "prompt": "a"}, "empty"),
        ({"prompt": "a a", "spans": [{"kind": "needle", "text": "a"}]}, "there once"),
        ({"prompt": "a", "spans": [{"kind": "needle", "text": "b"}]}, "there once"),
        ({"prompt": "a", "spans": [{"kind": "pin", "text": "a"}]}, "needle or answer"),
        ({"prompt": "a", "spans": [{"kind": "needle", "text": ""}]}, "there once"),
        ({"prompt": "a", "check": {"kind": "vibes"}}, "'vibes'"),
        ({"prompt": "a", "check": {"kind": "number", "value": "3"}}, "value must be int or float"),
        ({"prompt": "a", "check": {"kind": "regex", "pattern": "("}}, "regular expression"),
    ],
)
def test_a_bad_line_is_named_and_the_others_go_on(tmp_path: Path, line: object, why: str) -> None:
    file = read_json(tmp_path, line, {"id": "after", "prompt": "b"})
    assert [prompt.id for prompt in file.prompts] == ["good", "after"]
    assert [bad.line for bad in file.bad] == [2]
    assert why in file.bad[0].why


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b'{"prompt": "caf\xe9"}', "not UTF-8 at byte 16"),
        (b'{"prompt": "a",}', "invalid JSON at column 16"),
        (b'{"prompt": ' + b"[" * 100_000, "nesting too deep"),
        (b'{"max_new_tokens": ' + b"9" * 5_000 + b"}", "number too long"),
    ],
)
def test_unreadable_bytes_are_named_by_place(tmp_path: Path, raw: bytes, why: str) -> None:
    file = read(tmp_path, b'{"prompt": "a"}\n' + raw + b'\n{"prompt": "b"}\n')
    assert [prompt.id for prompt in file.prompts] == ["line-0001", "line-0003"]
    assert [bad.line for bad in file.bad] == [2]
    assert why in file.bad[0].why


def test_a_real_character_outside_the_basic_plane_is_no_lone_surrogate(tmp_path: Path) -> None:
    file = read(tmp_path, '{"prompt": "\\ud83d\\ude00"}')
    assert file.prompts[0].messages == user("\U0001f600")


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\n", b"{}\n"])
def test_a_file_without_any_prompt_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="gives no prompt"):
        read(tmp_path, content)


def test_utf_16_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="UTF-16"):
        read(tmp_path, "hello\n".encode("utf-16"))


@pytest.mark.parametrize("source", ["nothing-here", ".", "a" * 5_000, "a\0b"])
def test_a_missing_file_names_what_is_built_in(source: str) -> None:
    with pytest.raises(InputError, match=r"built-in name \(core\)"):
        read_prompts(source)


@given(texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=1))
def test_json_lines_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    content = "\n".join(json.dumps({"turns": texts[: n + 1]}) for n in range(len(texts)))
    file = read(tmp_path_factory.mktemp("prompts"), content)
    assert [p.messages for p in file.prompts] == [user(*texts[: n + 1]) for n in range(len(texts))]


def test_built_in_prompts_are_found_inside_a_package_and_beside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tracekit"
    package.mkdir()
    monkeypatch.setattr(module, "files", lambda _: package)
    assert module.builtin_folder() == tmp_path / "data" / "prompts"
    (package / "data" / "prompts").mkdir(parents=True)
    assert module.builtin_folder() == package / "data" / "prompts"


# The built-in set --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core() -> tuple[Prompt, ...]:
    file = read_prompts("core")
    assert file.bad == ()
    return file.prompts


def test_core_holds_forty_prompts_at_least_four_of_each_domain(core: tuple[Prompt, ...]) -> None:
    assert len(core) == 40
    assert set(DOMAINS) == {prompt.domain for prompt in core}
    assert min(Counter(prompt.domain for prompt in core).values()) >= 4
    assert all(prompt.id.startswith(f"{prompt.domain}-") for prompt in core)
    assert all(64 <= (prompt.max_new_tokens or 0) <= 256 for prompt in core)


def test_the_first_sixteen_of_core_cover_all_domains_with_two_long_ones(
    core: tuple[Prompt, ...],
) -> None:
    counts = Counter(prompt.domain for prompt in core[:16])
    assert set(counts) == set(DOMAINS)
    assert counts["retrieval"] == 2
    assert counts["summary"] >= 2


def test_core_has_contexts_needles_turns_checks_and_chinese(core: tuple[Prompt, ...]) -> None:
    by_domain = {domain: [p for p in core if p.domain == domain] for domain in DOMAINS}
    assert sum(prompt.context is not None for prompt in core) >= 8
    assert all(p.context for p in by_domain["summary"] + by_domain["retrieval"])
    judged = ("code", "retrieval", "instruction", "reasoning")
    assert all(prompt.check for domain in judged for prompt in by_domain[domain])
    assert {p.check["kind"] for p in core if p.check} == {"exact", "regex", "number", "python"}
    for prompt in by_domain["retrieval"]:
        needle, answer = prompt.spans
        assert (needle.kind, answer.kind) == ("needle", "answer")
        assert answer.text in needle.text
        assert prompt.context is not None
        assert prompt.context.index(needle.text) < len(prompt.context) / 4
    answered = [sum(m.role == "user" for m in p.messages or ()) for p in by_domain["dialogue"]]
    assert min(answered) >= 2
    roles = [[m.role for m in p.messages or ()] for p in by_domain["dialogue"]]
    assert sum("assistant" not in spoken for spoken in roles) >= 2
    is_chinese = [sum("\u4e00" <= c <= "\u9fff" for c in str(prompt)) > 20 for prompt in core]
    assert sum(is_chinese) >= 4


def test_no_line_of_core_stands_in_it_twice(core: tuple[Prompt, ...]) -> None:
    texts = [m.content for p in core for m in p.messages or ()] + [p.text for p in core if p.text]
    lines = [line for text in texts for line in text.splitlines() if len(line) > 40]
    assert len(set(lines)) == len(lines)
