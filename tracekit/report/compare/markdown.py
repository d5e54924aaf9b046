"""A comparison as GitHub Markdown, for a pull request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracekit.report.formats import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracekit.report.compare.parts import Part

_PLAIN = re.compile(r"[A-Za-z0-9 .,;:%+\[\]()=/-]*")
"""What can stand in a cell as it is; the rest is set as code, so that nothing of it is markup."""

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~@])")


def markdown(made: Iterable[Part]) -> str:
    """Return parts as Markdown: names as code, pipes and line ends in them written out."""
    return "\n\n".join(_part(one) for one in made) + "\n"


def _part(one: Part) -> str:
    blocks = [f"### {_prose(one.title)}", *map(_prose, one.lines)]
    if one.columns:
        blocks.append("\n".join(_table(one.columns, one.rows)))
    return "\n\n".join(blocks)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    for row in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    """Return a cell: code where it has any sign that could be markup."""
    if _PLAIN.fullmatch(text):
        return text
    line = _one_line(text).replace("|", "\\|")
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{line}{space}{fence}"


def _prose(text: str) -> str:
    return _MARKUP.sub(r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    """Return text without line ends, control and bidi signs written out."""
    return visible(re.sub(r"\s", " ", text))
