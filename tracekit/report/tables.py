"""Tables for the page: plain rows of text, each cell with the number that it sorts by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from tracekit.report.blocks import Block
from tracekit.report.formats import NOTHING, count, number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MOST_ROWS = 60
"""Rows of a figure's numbers in the page; its CSV file has all of them."""

_PLAIN = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")
_ROUNDING = 0.005  # Of three digits.


@dataclass(frozen=True)
class Column:
    """One column: its label, how a value is written, and whether it is a number."""

    label: str
    write: Callable[[Any], str] = str
    is_number: bool = True


@dataclass(frozen=True)
class Cell:
    """One cell: its text and what it sorts by ('' for the text itself, or for null)."""

    text: str
    key: str
    is_number: bool

    @property
    def told_key(self) -> str:
        """The key, or '' where the page's script finds the same number in the text."""
        if not self.key or not _PLAIN.fullmatch(self.text):
            return self.key
        key = float(self.key)
        return "" if abs(float(self.text) - key) <= _ROUNDING * abs(key) else self.key


@dataclass(frozen=True, kw_only=True)
class HtmlTable(Block):
    """A table for the page; the first cell of a row is its heading.

    Parameters
    ----------
    name
        Its id in the page: unique, of letters, digits and hyphens.
    caption
        What it shows: level, n, interval, what was left out.
    columns, rows
        Its content.
    """

    kind: ClassVar[str] = "table"
    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def build(
    name: str, caption: str, columns: Iterable[Column], rows: Iterable[Iterable[Any]]
) -> HtmlTable:
    """Return a table from rows of raw values, one value a column; null is written 'n/a'."""
    columns = tuple(columns)
    cells = tuple(tuple(map(_cell, columns, row)) for row in rows)
    return HtmlTable(name=name, caption=caption, columns=columns, rows=cells)


def text_column(label: str) -> Column:
    """Return a column of texts."""
    return Column(label, str, is_number=False)


INTERVAL = text_column("95\u00a0% interval")
"""Column of intervals, written as text."""


def of_frame(name: str, caption: str, frame: pd.DataFrame) -> HtmlTable:
    """Return the table of a figure's numbers, columns named as in its CSV file.

    Beyond ``MOST_ROWS`` rows are left out, and counted in the caption.
    """
    columns = [
        Column(
            str(label),
            number if pd.api.types.is_float_dtype(kind) else str,
            is_number=pd.api.types.is_numeric_dtype(kind),
        )
        for label, kind in frame.dtypes.items()
    ]
    if len(frame) > MOST_ROWS:
        caption += f"; the first {MOST_ROWS} of {count(len(frame))} rows, the CSV file has all"
    rows = frame.head(MOST_ROWS).itertuples(index=False, name=None)
    return build(name, caption, columns, rows)


def _cell(column: Column, value: Any) -> Cell:
    if pd.isna(value):
        return Cell(NOTHING, "", column.is_number)
    key = f"{float(value):.9g}" if column.is_number else ""
    return Cell(column.write(value), key, column.is_number)
