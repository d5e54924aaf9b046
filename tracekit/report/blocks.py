"""What a page is made of: a section is a title and blocks, each kind with a template of its name.

A new kind of block is a class here or beside its data and a file ``templates/blocks/KIND.html.j2``,
which sees it as ``block``.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class Block(ABC):
    """A part of a page."""

    kind: ClassVar[str]
    """Name of its template."""

    def parts(self) -> Iterator[Block]:
        """Yield this block and all that lie inside it."""
        yield self


@dataclass(frozen=True, kw_only=True)
class Text(Block):
    """A paragraph; ``look`` is a class of the style sheet: verdict, rule, note, caution."""

    kind: ClassVar[str] = "text"
    text: str
    look: str = ""


@dataclass(frozen=True, kw_only=True)
class Heading(Block):
    """A heading inside a section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True, kw_only=True)
class Items(Block):
    """A list of findings: what each is about, and what is said of it ('' stands for nothing)."""

    kind: ClassVar[str] = "items"
    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Facts(Block):
    """Terms and what they are; texts of ``code`` terms are set as code."""

    kind: ClassVar[str] = "facts"
    facts: tuple[tuple[str, str], ...]
    has_code_terms: bool = False


@dataclass(frozen=True, kw_only=True)
class Code(Block):
    """Text to be copied as it is, with what it is."""

    kind: ClassVar[str] = "code"
    name: str
    caption: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Group(Block):
    """A block that holds others."""

    blocks: tuple[Block, ...]

    def parts(self) -> Iterator[Block]:
        """Yield this block and all that lie inside it."""
        yield self
        for block in self.blocks:
            yield from block.parts()


@dataclass(frozen=True, kw_only=True)
class Framed(Group):
    """Blocks in a frame that stands out: an answer."""

    kind: ClassVar[str] = "framed"


@dataclass(frozen=True, kw_only=True)
class Details(Group):
    """Blocks that are folded up until somebody wants them."""

    kind: ClassVar[str] = "details"
    summary: str


@dataclass(frozen=True, kw_only=True)
class Absent(Block):
    """What these results do not hold, and the command that would get it."""

    kind: ClassVar[str] = "absent"
    what: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with a heading of its own.

    Parameters
    ----------
    name
        Its id.
    title
        Its heading.
    short
        The same in the list of sections.
    blocks
        What stands in it.
    """

    name: str
    title: str
    short: str
    blocks: tuple[Block, ...]

    def parts(self) -> Iterator[Any]:
        """Yield all blocks, those inside others too."""
        for block in self.blocks:
            yield from block.parts()
