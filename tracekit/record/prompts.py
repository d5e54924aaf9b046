"""Prompt files: plain lines, JSONL of several shapes, and the built-in sets.

A bad line never stops the others: it is named by number and reason, and the rest is read.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DEFAULT_DOMAIN = "general"
"""Domain of a prompt that names none."""

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_BODIES = ("prompt", "messages", "text", "turns", "context")
_SPAN_KINDS = ("needle", "answer")

_FIELDS: dict[str, tuple[type, ...]] = {
    "id": (str, int),
    "question_id": (str, int),
    "domain": (str,),
    "category": (str,),
    "prompt": (str,),
    "messages": (list,),
    "text": (str,),
    "turns": (list,),
    "context": (str,),
    "question": (str,),
    "system": (str,),
    "max_new_tokens": (int,),
    "spans": (list,),
    "check": (dict,),
}

_CHECKS: dict[str, dict[str, tuple[type, ...]]] = {
    "exact": {"text": (str,)},
    "regex": {"pattern": (str,)},
    "number": {"value": (int, float)},
    "python": {"function": (str,), "test": (str,)},
}


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


@dataclass(frozen=True)
class BadLine:
    """A line that gives no prompt: its number, 1 first, and why."""

    line: int
    why: str


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, in order, the lines that gave none, and the hash of its bytes."""

    name: str
    prompts: tuple[Prompt, ...]
    bad: tuple[BadLine, ...]
    sha256: str = ""


def builtin_folder() -> Path:
    """Return the folder of the built-in sets: inside an installed package, beside a checkout's."""
    package = Path(str(files("tracekit")))
    inside = package / "data" / "prompts"
    return inside if inside.is_dir() else package.parent / "data" / "prompts"


def read_prompts(source: str) -> PromptFile:
    """Read a prompt file.

    Parameters
    ----------
    source
        A built-in name (``core``), which goes before a file of that name here, or a path. A file
        is JSONL if it is named so or if its first line begins with ``{``; else each line is a
        prompt. Fields of a JSON object that are not listed in ``data/prompts/README.md`` are
        ignored.

    Raises
    ------
    InputError
        If there is no such file, if it cannot be read, or if no line of it gives a prompt.
    """
    path = _find(source)
    data = _bytes(path)
    lines = list(_lines(data))
    is_json = path.suffix.lower() in _JSON_SUFFIXES or (
        bool(lines) and lines[0][1].lstrip().startswith(b"{")
    )
    parse = _from_json if is_json else _from_words
    prompts: dict[str, Prompt] = {}
    bad: list[BadLine] = []
    for number, raw in lines:
        try:
            prompt = parse(_decode(raw), f"line-{number:04d}")
            if prompt.id in prompts:
                msg = f"the id {prompt.id!r} is taken by an earlier line"
                raise InputError(msg)
            prompts[prompt.id] = prompt
        except InputError as error:
            bad.append(BadLine(number, str(error)))
    if not prompts:
        why = f"line {bad[0].line}: {bad[0].why}" if bad else "it holds blank lines only"
        msg = (
            f"{source} gives no prompt ({why}); write one prompt a line, or one JSON object a line."
        )
        raise InputError(msg)
    digest = hashlib.sha256(data).hexdigest()
    return PromptFile(source, tuple(prompts.values()), tuple(bad), digest)


def _find(source: str) -> Path:
    builtin = {path.stem: path for path in sorted(builtin_folder().glob("*.jsonl"))}
    path = builtin.get(source, Path(source))
    # os.path answers False where pathlib raises: a whole prompt given as a path is too long a name.
    if not os.path.isfile(path):  # noqa: PTH113
        known = ", ".join(builtin) or "none found"
        msg = f"no prompt file {source!r}; give a path or a built-in name ({known})."
        raise InputError(msg)
    return path


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}); check its permissions."
        raise InputError(msg) from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        msg = f"{path} is UTF-16; save it as UTF-8."
        raise InputError(msg)
    return data


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers, line ends and BOM removed."""
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line.removesuffix(b"\r")


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        msg = f"not UTF-8 at byte {error.start + 1}"
        raise InputError(msg) from error


def _from_words(line: str, default_id: str) -> Prompt:
    return Prompt(id=default_id, domain=DEFAULT_DOMAIN, messages=_chat([line]))


def _from_json(line: str, default_id: str) -> Prompt:
    data = _load(line)
    return Prompt(
        id=str(data.get("id", data.get("question_id", default_id))),
        domain=data.get("domain", data.get("category", DEFAULT_DOMAIN)),
        messages=_messages(data),
        text=data.get("text"),
        context=data.get("context"),
        question=data.get("question"),
        max_new_tokens=data.get("max_new_tokens"),
        spans=tuple(
            MarkedSpan(**_strings(span, ("kind", "text"))) for span in data.get("spans", ())
        ),
        check=_check(data.get("check")),
    )


def _load(line: str) -> dict[str, Any]:
    """Return the line's object, nulls left out, known fields of their types."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        msg = f"invalid JSON at column {error.colno}: {error.msg}"
        raise InputError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = "JSON with a number too long or nesting too deep to read"
        raise InputError(msg) from error
    if type(data) is not dict:
        msg = f"must be a JSON object, not {type(data).__name__}"
        raise InputError(msg)
    kept = {name: value for name, value in data.items() if value is not None}
    _accept_types(kept, {name: kinds for name, kinds in _FIELDS.items() if name in kept})
    return kept


def _accept_types(data: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]]) -> None:
    """Refuse an object in which a field is missing or has another type (a bool is no number)."""
    for name, kinds in fields.items():
        if type(data.get(name)) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            msg = f"{name} must be {wanted}, not {type(data.get(name)).__name__}"
            raise InputError(msg)


def _strings(item: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Return the named fields of an item of a list, all strings."""
    if type(item) is not dict:
        msg = f"needs an object with {' and '.join(names)} in the list, not {type(item).__name__}"
        raise InputError(msg)
    _accept_types(item, dict.fromkeys(names, (str,)))
    return {name: item[name] for name in names}


def _messages(data: Mapping[str, Any]) -> tuple[Message, ...] | None:
    """Return the chat of a line's object, None for raw text."""
    bodies = [name for name in _BODIES if name in data]
    if len(bodies) != 1 or ("question" in data) != ("context" in data):
        found = ", ".join(name for name in (*_BODIES, "question") if name in data) or "none"
        msg = f"needs one of prompt, messages, text, turns, or context with question; has {found}"
        raise InputError(msg)
    if "system" in data and bodies[0] in ("messages", "text"):
        msg = f"system does not go with {bodies[0]}, which can hold it itself"
        raise InputError(msg)
    return _READERS[bodies[0]](data)


def _from_context(data: Mapping[str, Any]) -> tuple[Message, ...]:
    for part in ("context", "question"):
        if not data[part].strip():
            msg = f"the {part} is empty"
            raise InputError(msg)
    return _chat([join(data["context"], data["question"])], data.get("system"))


def _from_messages(data: Mapping[str, Any]) -> tuple[Message, ...]:
    return tuple(Message(**_strings(item, ("role", "content"))) for item in data["messages"])


def _from_turns(data: Mapping[str, Any]) -> tuple[Message, ...]:
    turns = {f"turn {number}": turn for number, turn in enumerate(data["turns"], start=1)}
    _accept_types(turns, dict.fromkeys(turns, (str,)))
    return _chat(data["turns"], data.get("system"))


def _chat(turns: list[str], system: str | None = None) -> tuple[Message, ...]:
    head = () if system is None else (Message(role="system", content=system),)
    return (*head, *(Message(role="user", content=turn) for turn in turns))


_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[Message, ...] | None]] = {
    "prompt": lambda data: _chat([data["prompt"]], data.get("system")),
    "messages": _from_messages,
    "text": lambda data: None,
    "turns": _from_turns,
    "context": _from_context,
}


def _check(check: dict[str, Any] | None) -> dict[str, Any] | None:
    if check is None:
        return None
    fields = _CHECKS.get(str(check.get("kind")))
    if fields is None:
        msg = f"check needs a kind out of {', '.join(_CHECKS)}, not {check.get('kind')!r}"
        raise InputError(msg)
    _accept_types(check, fields)
    try:
        re.compile(check.get("pattern", ""))
    except re.error as error:
        msg = f"the pattern of check is no regular expression: {error}"
        raise InputError(msg) from error
    return check
