"""What a report needs of a figure: its picture, the words that go with it, and its numbers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tracekit.report.blocks import Block
from tracekit.report.tables import HtmlTable, of_frame

if TYPE_CHECKING:
    import pandas as pd

_INK = (
    "<style>svg { color: #000000 } "
    "@media (prefers-color-scheme: dark) { svg { color: #e6e8ea } }</style>"
)


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def _plain(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula; numbers stay numbers."""
    return f"'{value}" if type(value) is str and value.startswith(_FORMULA) else value


@dataclass(frozen=True, kw_only=True)
class Figure(Block):
    """A picture with its caption, its text for those who do not see it, and its data.

    Parameters
    ----------
    name
        Stem of its files and of its ids.
    caption
        What it shows: level, n, interval, what to look for.
    alt
        The key number in a sentence.
    table
        The numbers drawn, for the table in the page and the CSV file.
    """

    kind: ClassVar[str] = "figure"
    ending: ClassVar[str]
    """Ending of its file."""

    name: str
    caption: str
    alt: str
    table: pd.DataFrame

    @property
    @abstractmethod
    def content(self) -> bytes:
        """The picture's file."""

    @property
    def csv(self) -> bytes:
        """The table as a CSV file (UTF-8, line feeds, six digits).

        Texts come from prompts: those that a spreadsheet would run get an apostrophe in front.
        """
        plain = self.table.map(_plain).rename(columns=_plain)
        text: str = plain.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        return text.encode("utf-8", "backslashreplace")

    @property
    def numbers(self) -> HtmlTable:
        """The table as a block of the page."""
        return of_frame(f"{self.name}-numbers", f"Numbers of {self.name}", self.table)


@dataclass(frozen=True, kw_only=True)
class Drawing(Figure):
    """Lines and bars as SVG, text as text, in the colours of the page.

    Parameters
    ----------
    svg
        Element ``<svg>`` for use inside a page: no name space, ids that no other figure has.
    """

    ending: ClassVar[str] = "svg"
    svg: str

    @property
    def content(self) -> bytes:
        """A file of its own: black on a transparent ground, light where the viewer is dark."""
        head, rest = self.svg.split(">", 1)
        head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
        return f"{head}>{_INK}{rest}\n".encode("utf-8", "backslashreplace")


@dataclass(frozen=True, kw_only=True)
class Map(Figure):
    """A map of one pixel a cell, enlarged by the page; axes and legend are HTML.

    Parameters
    ----------
    png, legend_png
        The map, and a row of its colours from low to high.
    rows, columns
        Labels of all rows and columns, top and left first.
    row_axis
        What the rows are.
    legend
        Labels along the legend, low to high.
    marked
        Row labels that are pointed at; the caption says why.
    """

    ending: ClassVar[str] = "png"
    png: bytes
    legend_png: bytes
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_axis: str
    legend: tuple[str, ...]
    marked: tuple[str, ...] = ()

    @property
    def content(self) -> bytes:
        """The map, one pixel a cell."""
        return self.png
