"""Files that are one text each."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.errors import InputError
from tracekit.record.job import Skipped
from tracekit.record.lines import decode, read_bytes

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Text:
    """The text of a file, its name, and the hash of its bytes."""

    name: str
    text: str
    sha256: str


def read_texts(paths: list[Path]) -> tuple[list[Text], list[Skipped]]:
    """Return the texts of files, and the files that give none with the reason.

    Parameters
    ----------
    paths
        Files and folders; of a folder, each file directly in it whose name begins with no dot.

    Raises
    ------
    InputError
        If no file gives a text, or two have the same name.
    """
    texts, skipped = [], []
    for name, path in _files(paths).items():
        try:
            texts.append(_read_text(name, path))
        except InputError as error:
            skipped.append(Skipped(name, str(error)))
    if not texts:
        raise InputError(skipped[0].why)
    return texts, skipped


def _files(paths: list[Path]) -> dict[str, Path]:
    """Return the files by name, folders opened."""
    files: dict[str, Path] = {}
    for path in paths:
        # os.path answers False where pathlib raises: a text given as a path is too long a name.
        inside = sorted(path.iterdir()) if os.path.isdir(path) else [path]  # noqa: PTH112
        for file in inside:
            if file != path and (file.name.startswith(".") or not file.is_file()):
                continue
            if file.name in files:
                msg = f"{files[file.name]} and {file} have the same name; rename one."
                raise InputError(msg)
            files[file.name] = file
    if not files:
        msg = f"{', '.join(map(str, paths)) or 'an empty list'} holds no file; give UTF-8 text."
        raise InputError(msg)
    return files


def _read_text(name: str, path: Path) -> Text:
    data = read_bytes(path)
    try:
        text = decode(data).removeprefix("\ufeff")
    except InputError as error:
        msg = f"{path} is {error}; save it as UTF-8."
        raise InputError(msg) from error
    if not text.strip():
        msg = f"{path} holds no text; give it some."
        raise InputError(msg)
    return Text(name, text, hashlib.sha256(data).hexdigest())


def digest(texts: list[Text]) -> str:
    """Return the hash of one text, or of the list of several."""
    if len(texts) == 1:
        return texts[0].sha256
    listed = "\n".join(f"{text.sha256}  {text.name}" for text in texts)
    return hashlib.sha256(listed.encode()).hexdigest()
