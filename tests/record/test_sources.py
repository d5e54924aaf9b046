from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.record.rendering_cases import BOS, END, chat, said, with_bos, with_template
from tracekit.errors import InputError, ModelError, UsageError
from tracekit.record.job import Job, Skipped
from tracekit.record.prompt import Prompt
from tracekit.record.prompts import PromptFile
from tracekit.record.render import render
from tracekit.record.rendering import Rendering
from tracekit.record.sources.conversations import ConversationSource
from tracekit.record.sources.prompts import PromptSource
from tracekit.record.sources.text import TextSource

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.record.source import Source

RAW, CHAT = Rendering(format="raw"), Rendering(format="chat")
TEXT = Prompt(id="t", domain="story", text="in the", max_new_tokens=7)
TURNS = chat(("user", "a"), ("user", "b"), check={"kind": "exact", "text": "b"})


def prompts(*made: Prompt) -> PromptFile:
    return PromptFile("made", made, (), "some hash")


def run(source: Source, tokenizer: Any = None) -> tuple[list[Job], list[Skipped]]:
    tokenizer = tokenizer or tiny.tokenizer()
    found = list(source.jobs(tokenizer))
    jobs = [one for one in found if isinstance(one, Job)]
    assert len({job.sequence_id for job in jobs}) == len(jobs)
    return jobs, [one for one in found if isinstance(one, Skipped)]


# Prompts -----------------------------------------------------------------------------------------


def test_each_sample_of_a_prompt_is_a_sequence() -> None:
    source = PromptSource(prompts(TEXT, TURNS), samples=2)
    jobs, skipped = run(source)
    assert not skipped
    assert [job.sequence_id for job in jobs] == ["t#0", "t#1", "p#0", "p#1"]
    assert [job.sample for job in jobs] == [0, 1, 0, 1]
    assert source.count(tiny.tokenizer()) == 4
    job = jobs[3]
    assert (job.prompt_id, job.domain, job.prompt, job.check) == ("p", "d", TURNS, TURNS.check)
    assert job.parts == tuple(render(TURNS, tiny.tokenizer()))
    assert (job.prompt_end, job.max_new_tokens) == (len(job.parts[0].ids), None)
    assert (job.is_given, job.text_start, job.scored_from) == (False, None, 1)
    assert jobs[0].max_new_tokens == 7


def test_a_limit_is_of_prompts_and_no_setting() -> None:
    source = PromptSource(prompts(TEXT, TURNS), samples=2, limit=1)
    assert [job.sequence_id for job in run(source)[0]] == ["t#0", "t#1"]
    assert source.count(tiny.tokenizer()) == 2
    assert source.settings() == PromptSource(prompts(TEXT, TURNS), samples=2).settings()


def test_settings_tell_samples_format_and_special_tokens() -> None:
    settings = PromptSource(prompts(TEXT), RAW, samples=3).settings()
    assert settings == {
        "kind": "prompts",
        "samples": 3,
        "window": None,
        "stride": None,
        "domain": None,
        "format": "raw",
        "special_tokens": "literal",
    }


def test_a_prompt_that_cannot_be_rendered_is_skipped_once_and_the_rest_goes_on() -> None:
    jobs, skipped = run(PromptSource(prompts(TURNS, TEXT), samples=2), with_template(None))
    assert [job.sequence_id for job in jobs] == ["t#0", "t#1"]
    ((name, why),) = ((one.prompt, one.why) for one in skipped)
    assert name == "p"
    assert "--raw" in why


def test_chat_without_a_template_is_refused_once() -> None:
    with pytest.raises(InputError, match="--raw"):
        next(PromptSource(prompts(TURNS, TEXT), CHAT).jobs(with_template(None)))


def test_prompts_are_rendered_one_by_one() -> None:
    jobs = PromptSource(prompts(TEXT, TURNS)).jobs(with_template("{{ 1 / 0 }}"))
    assert isinstance(next(jobs), Job)


@pytest.mark.parametrize("numbers", [{"samples": 0}, {"limit": 0}])
def test_numbers_below_one_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        PromptSource(prompts(TEXT), **numbers)


# Texts -------------------------------------------------------------------------------------------


def written(tmp_path: Path, content: str | bytes, name: str = "a.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_is_one_sequence_without_windows(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffin the <|im_end|>\r\n")
    source = TextSource(str(path))
    (job,), skipped = run(source)
    assert not skipped
    assert (job.sequence_id, job.prompt_id, job.domain) == ("a.txt#w0000", "a.txt", "text")
    assert (job.is_given, job.max_new_tokens, job.prompt_end) == (True, 0, None)
    assert (job.text_start, job.scored_from) == (0, 1)
    (part,) = job.parts
    assert part.text == tiny.tokenizer().decode(part.ids) == "in the <|im_end|>\r\n"
    assert END not in part.ids
    assert (set(part.roles), set(part.turns), part.turn_ends) == ({None}, {0}, ())
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source.name == str(path)


def test_special_tokens_in_a_text_are_parsed_if_asked(tmp_path: Path) -> None:
    path = written(tmp_path, "<|endoftext|>in<|im_end|>")
    rendering = Rendering(special_tokens="parse")
    for tokenizer in (tiny.tokenizer(), with_bos(after="<|im_end|>")):
        (job,), _ = run(TextSource(path, rendering), tokenizer)
        assert tokenizer.decode(job.parts[0].ids) == "<|endoftext|>in<|im_end|>"
        assert job.parts[0].text == "<|endoftext|>in<|im_end|>"


@given(
    content=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip),
    window=st.integers(2, 9),
    data=st.data(),
    has_bos=st.booleans(),
)
def test_windows_score_each_token_of_the_text_once(
    tmp_path_factory: pytest.TempPathFactory,
    content: str,
    window: int,
    data: st.DataObject,
    has_bos: bool,
) -> None:
    stride = data.draw(st.none() | st.integers(1, window))
    tokenizer = with_bos() if has_bos else tiny.tokenizer()
    path = written(tmp_path_factory.mktemp("text"), content)
    source = TextSource(path, window=window, stride=stride)
    jobs, _ = run(source, tokenizer)
    assert len(jobs) == source.count(tokenizer)
    whole = tiny.tokenizer()(content, split_special_tokens=True)["input_ids"]
    scored = [0] * len(whole)
    for job in jobs:
        (part,) = job.parts
        assert len(part.ids) <= window
        assert (part.ids[0] == BOS and part.is_template[0]) is has_bos
        assert job.text_start is not None
        assert job.scored_from >= 1
        own = list(part.ids[has_bos:])
        assert own == whole[job.text_start : job.text_start + len(own)]
        for position in range(job.scored_from, len(part.ids)):
            scored[job.text_start + position - has_bos] += 1
    assert scored == [int(has_bos)] + [1] * (len(whole) - 1)


def test_windows_show_their_own_characters(tmp_path: Path) -> None:
    path = written(tmp_path, " in the \u4e16 on")
    jobs, _ = run(TextSource(path, window=3))
    assert [job.sequence_id for job in jobs] == [f"a.txt#w000{n}" for n in range(len(jobs))]
    assert [job.parts[0].text for job in jobs] == [" in the", " the \u4e16", "\u4e16", "\u4e16 on"]


def test_several_texts_and_folders_are_one_text_each(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    written(folder, "in", "b.txt")
    written(folder, "the", "a.txt")
    written(folder, "no", ".hidden")
    written(folder, b"\xff", "c.bin")
    written(folder, " \n", "d.txt")
    source = TextSource([folder, written(tmp_path, "on", "e.txt")], domain="story", limit=2)
    jobs, skipped = run(source)
    assert [job.sequence_id for job in jobs] == ["a.txt#w0000", "b.txt#w0000"]
    assert [(one.prompt, one.why.partition(";")[0]) for one in skipped] == [
        ("c.bin", f"{folder / 'c.bin'} is not UTF-8 at byte 1"),
        ("d.txt", f"{folder / 'd.txt'} holds no text"),
    ]
    assert source.count(tiny.tokenizer()) == 4
    settings = source.settings()
    assert (settings["kind"], settings["domain"], settings["format"]) == ("text", "story", "raw")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff", "is not UTF-8 at byte 1"),
        (b" \n", "holds no text"),
        (b"", "holds no text"),
        ("a".encode("utf-16"), "is UTF-16"),
    ],
)
def test_a_file_that_is_no_text_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        TextSource(written(tmp_path, content))


def test_what_is_not_there_or_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        TextSource(tmp_path / "nothing")
    with pytest.raises(InputError, match="cannot be read"):
        TextSource("a" * 5_000)
    with pytest.raises(InputError, match="holds no file"):
        TextSource(tmp_path)
    with pytest.raises(InputError, match="holds no file"):
        TextSource([])
    path = written(tmp_path, "a")
    with pytest.raises(InputError, match="the same name"):
        TextSource([path, tmp_path])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"window": 1}, "window must be at least 2"),
        ({"window": 4, "stride": 0}, "stride must be at least 1"),
        ({"window": 4, "stride": 5}, "stride 5 needs a window"),
        ({"stride": 5}, "stride 5 .* give a window as well"),
        ({"limit": 0}, "limit must be"),
        ({"rendering": CHAT}, "no chat template"),
    ],
)
def test_windows_that_leave_tokens_out_are_refused(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        TextSource(written(tmp_path, "a"), **settings)


def test_a_text_without_tokens_is_skipped(tmp_path: Path) -> None:
    tokenizer = _Mute()
    jobs, skipped = run(TextSource(written(tmp_path, "a")), tokenizer)
    assert not jobs
    assert "no tokens" in skipped[0].why


def test_a_text_is_tokenised_once(tmp_path: Path) -> None:
    tokenizer = _Mute()
    source = TextSource(written(tmp_path, "a"))
    source.count(tokenizer)
    run(source, tokenizer)
    assert tokenizer.calls == 1
    assert source.count(tiny.tokenizer()) == 1


class _Mute:
    """A tokenizer that gives no ids, and counts how often it is asked."""

    is_fast = True
    chat_template = None
    bos_token_id = None

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> dict[str, list[Any]]:
        self.calls += 1
        return {"input_ids": [], "offset_mapping": [], "special_tokens_mask": []}


def test_a_tokenizer_without_offsets_is_refused_once(tmp_path: Path) -> None:
    tokenizer = _Mute()
    tokenizer.is_fast = False
    line = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    for source in (
        PromptSource(prompts(TEXT)),
        TextSource(written(tmp_path, "a")),
        ConversationSource(written(tmp_path, line, "b.jsonl")),
    ):
        with pytest.raises(ModelError, match="no character offsets"):
            next(source.jobs(tokenizer))


# Conversations -----------------------------------------------------------------------------------

TALK = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]


def conversations(tmp_path: Path, *lines: object, **more: Any) -> ConversationSource:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return ConversationSource(written(tmp_path, "\n".join(texts), "talk.jsonl"), **more)


def talk(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [vars(message) for message in said(*messages)], **more}


def test_a_conversation_is_one_given_sequence(tmp_path: Path) -> None:
    source = conversations(tmp_path, talk(*TALK, id=5, domain="dialogue", turns=3), talk(*TALK))
    (job, other), skipped = run(source)
    assert not skipped
    assert (job.sequence_id, job.prompt_id, job.domain) == ("5#0", "5", "dialogue")
    assert (other.sequence_id, other.domain) == ("line-0002#0", "general")
    assert (job.is_given, job.max_new_tokens, job.text_start, job.prompt) == (True, 0, None, None)
    (part,) = job.parts
    head = tiny.tokenizer().decode(part.ids[: job.prompt_end])
    assert head.endswith("a<|im_end|>\n<|im_start|>assistant\n")
    assert len(part.turn_ends) == 4
    assert source.count(tiny.tokenizer()) == 2
    assert source.settings()["kind"] == "conversations"


@pytest.mark.parametrize("messages", [[("user", "a")], [("assistant", "b"), ("user", "a")]])
def test_without_anything_before_a_reply_there_is_no_prompt(
    tmp_path: Path, messages: list[tuple[str, str]]
) -> None:
    (job,), _ = run(conversations(tmp_path, talk(*messages), rendering=RAW))
    assert job.prompt_end is None


def test_bad_lines_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    source = conversations(
        tmp_path,
        talk(*TALK, id="x"),
        "no json",
        {"prompt": "a"},
        talk(("tool", "a")),
        talk(*TALK, id="x"),
        {"messages": [{"role": "user", "content": None}]},
        talk(*TALK),
        limit=1,
    )
    assert [bad.line for bad in source.bad] == [2, 3, 4, 5, 6]
    for bad, why in zip(
        source.bad, ["invalid JSON", "needs messages", "tool", "taken", "str"], strict=True
    ):
        assert why in bad.why
    assert [job.sequence_id for job in run(source)[0]] == ["x#0"]


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gives no conversation"):
        conversations(tmp_path, {"prompt": "a"})


def test_a_conversation_that_the_template_refuses_is_skipped(tmp_path: Path) -> None:
    refuses = (
        "{% if messages | length > 1 %}{{ raise_exception('too long') }}{% endif %}"
        + tiny.CHAT_TEMPLATE
    )
    source = conversations(tmp_path, talk(*TALK, id="x"), talk(("user", "a")))
    jobs, skipped = run(source, with_template(refuses))
    assert [job.sequence_id for job in jobs] == ["line-0002#0"]
    assert [one.prompt for one in skipped] == ["x"]
    assert "too long" in skipped[0].why
    jobs, skipped = run(source, with_template(None))
    assert not jobs
    assert all("--raw" in one.why for one in skipped)
