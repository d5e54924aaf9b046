"""Names of files and folders of a trace, and small writes that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.trace.folder import AnyPath

MANIFEST = "trace.json"
WEIGHTS = "weights.safetensors"
VOCABULARY = "vocab.parquet"
LISTING = "sequences.parquet"
SHARDS = "shards"
OPEN = ".open"
LOCK = ".lock"

FILES_KEY = b"tracekit.files"
"""Footer key of ``sequences.parquet``: names, sizes and SHA-256 of the shard's other files."""

CAPTURES = ("steps", "hidden", "qkv", "influence")
"""Capture levels, each containing the one before."""


def holds(capture: str, level: str) -> bool:
    """Return whether a capture level contains another, or is it."""
    return CAPTURES.index(capture) >= CAPTURES.index(level)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file through a temporary name, fsync and rename: whole, or the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    dump_json(temporary, data)
    sync_file(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def dump_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file for people to read."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def sync_file(path: Path) -> None:
    """Make a closed file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def entry(path: Path) -> dict[str, Any]:
    """Return what a trace notes of a file: its size and its SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: AnyPath) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        source: Any = file  # its type, BinaryIO, leaves out readinto
        return hashlib.file_digest(source, "sha256").hexdigest()
