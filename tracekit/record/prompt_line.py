"""From one line of a file to a prompt or conversation: plain words, or a JSON object."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError
from tracekit.record.prompt import Conversation, MarkedSpan, Message, Prompt, join

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_DOMAIN = "general"
"""Domain of a prompt that names none."""

_BODIES = ("prompt", "messages", "text", "turns", "context")

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

_CONVERSATION_FIELDS = {
    name: _FIELDS[name] for name in ("id", "question_id", "domain", "category", "messages")
}

_CHECKS: dict[str, dict[str, tuple[type, ...]]] = {
    "exact": {"text": (str,)},
    "regex": {"pattern": (str,)},
    "number": {"value": (int, float)},
    "python": {"function": (str,), "test": (str,)},
}


def from_words(line: str, default_id: str) -> Prompt:
    """Return the prompt whose only message is the line."""
    return Prompt(id=default_id, domain=DEFAULT_DOMAIN, messages=_chat([line]))


def from_json(line: str, default_id: str) -> Prompt:
    """Return the prompt that a JSON object describes, or raise InputError saying why not."""
    data = _load(line, _FIELDS)
    return Prompt(
        **_named(data, default_id),
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


def conversation_from_json(line: str, default_id: str) -> Conversation:
    """Return the conversation in a JSON object, or raise InputError saying why there is none."""
    data = _load(line, _CONVERSATION_FIELDS)
    if "messages" not in data:
        msg = "needs messages, a list of objects with role and content"
        raise InputError(msg)
    return Conversation(**_named(data, default_id), messages=_from_messages(data))


def _named(data: Mapping[str, Any], default_id: str) -> dict[str, str]:
    """Return id and domain of a line's object."""
    return {
        "id": str(data.get("id", data.get("question_id", default_id))),
        "domain": data.get("domain", data.get("category", DEFAULT_DOMAIN)),
    }


def _load(line: str, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Return the line's object, nulls left out, the named fields of their types."""
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
    _accept_types(kept, {name: kinds for name, kinds in fields.items() if name in kept})
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
