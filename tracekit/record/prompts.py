"""Prompt files: plain lines, JSONL of several shapes, and the built-in sets."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import InputError
from tracekit.record.lines import BadLine, numbered_lines, parse_lines, read_bytes, why_nothing
from tracekit.record.prompt_line import from_json, from_words

if TYPE_CHECKING:
    from tracekit.record.prompt import Prompt

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")


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
    data = read_bytes(path)
    lines = numbered_lines(data)
    is_json = path.suffix.lower() in _JSON_SUFFIXES or (
        bool(lines) and lines[0][1].lstrip().startswith(b"{")
    )
    prompts, bad = parse_lines(lines, from_json if is_json else from_words)
    if not prompts:
        msg = (
            f"{source} gives no prompt ({why_nothing(bad)}); write one prompt a line, or one JSON "
            "object a line."
        )
        raise InputError(msg)
    return PromptFile(source, prompts, bad, hashlib.sha256(data).hexdigest())


def _find(source: str) -> Path:
    builtin = {path.stem: path for path in sorted(builtin_folder().glob("*.jsonl"))}
    path = builtin.get(source, Path(source))
    # os.path answers False where pathlib raises: a whole prompt given as a path is too long a name.
    if not os.path.isfile(path):  # noqa: PTH113
        known = ", ".join(builtin) or "none found"
        msg = f"no prompt file {source!r}; give a path or a built-in name ({known})."
        raise InputError(msg)
    return path
