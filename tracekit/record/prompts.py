"""Prompt files: plain lines, JSONL of several shapes, and the built-in sets.

A bad line never stops the others: it is named by number and reason, and the rest is read.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import InputError
from tracekit.record.prompt_line import from_json, from_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.record.prompt import Prompt

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")


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
    parse = from_json if is_json else from_words
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
