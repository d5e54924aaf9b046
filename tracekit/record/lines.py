"""Files of text: UTF-8 with or without BOM, LF or CRLF, one item a line.

A bad line never stops the others: it is named by number and reason, and the rest is read.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from tracekit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


@dataclass(frozen=True)
class BadLine:
    """A line that gives nothing: its number, 1 first, and why."""

    line: int
    why: str


class _Named(Protocol):
    @property
    def id(self) -> str: ...


_Item = TypeVar("_Item", bound=_Named)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file that may be UTF-8, its byte order mark included.

    Raises
    ------
    InputError
        If it cannot be read, or is UTF-16.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}); check its name and permissions."
        raise InputError(msg) from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        msg = f"{path} is UTF-16; save it as UTF-8."
        raise InputError(msg)
    return data


def decode(raw: bytes) -> str:
    """Return UTF-8 as text.

    Raises
    ------
    InputError
        With the first byte that is wrong.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        msg = f"not UTF-8 at byte {error.start + 1}"
        raise InputError(msg) from error


def numbered_lines(data: bytes) -> list[tuple[int, bytes]]:
    """Return the lines that are not blank, with their numbers, line ends and BOM removed."""
    lines = enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1)
    return [(number, line.removesuffix(b"\r")) for number, line in lines if line.strip()]


def parse_lines(
    lines: Iterable[tuple[int, bytes]], parse: Callable[[str, str], _Item]
) -> tuple[tuple[_Item, ...], tuple[BadLine, ...]]:
    """Return the items that lines give, in order, and the lines that gave none.

    Parameters
    ----------
    lines
        Numbers and bytes.
    parse
        From a line and an id for items that have none of their own, ``line-0007``, to an item with
        an ``id``; raises InputError. A second item of the same id is a bad line.
    """
    items: dict[str, _Item] = {}
    bad: list[BadLine] = []
    for number, raw in lines:
        try:
            item = parse(decode(raw), f"line-{number:04d}")
            if item.id in items:
                msg = f"the id {item.id!r} is taken by an earlier line"
                raise InputError(msg)
            items[item.id] = item
        except InputError as error:
            bad.append(BadLine(number, str(error)))
    return tuple(items.values()), tuple(bad)


def why_nothing(bad: tuple[BadLine, ...]) -> str:
    """Return why a file gave nothing at all."""
    return f"line {bad[0].line}: {bad[0].why}" if bad else "it holds blank lines only"
