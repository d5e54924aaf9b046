"""Data on stdout: one JSON object, or text and tables that fit 100 columns."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 100

GAP = 3
"""Columns between two cells of a table."""

_NUMBER = re.compile(r"([+-]?\d[\d,]*(\.\d*)?(e[+-]?\d+)?( ?%)?|-|)")
"""What stands in a column of numbers: ``-3.3e-15``, ``1,024``, ``12 %``, '-' for none, nothing."""

_NO_NUMBERS = {"Infinity": "inf", "-Infinity": "-inf", "NaN": None}


def emit(data: Any, text: str, *, as_json: bool) -> None:
    """Print the data as JSON, or the text for people.

    JSON knows finite numbers only: infinite ones are the texts "inf" and "-inf", NaN is null.
    """
    sys.stdout.write(_strict(data) if as_json else text)
    sys.stdout.write("\n")


def _strict(data: Any) -> str:
    """Return data as JSON that strict readers take."""
    finite = json.loads(json.dumps(data), parse_constant=_NO_NUMBERS.__getitem__)
    return json.dumps(finite, ensure_ascii=False, indent=1, allow_nan=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, gap: int = GAP
) -> str:
    """Return a table as text; columns whose cells are all numbers are set to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, gap - 2),
    )
    for number, name in enumerate(columns):
        cells = [row[number] for row in rows]
        right = bool(cells) and all(_is_number(cell) for cell in cells)
        made.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    console = Console(width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None


def number(value: Any, digits: int = 3) -> str:
    """Return a number in few digits; nothing for null."""
    if value is None or value != value:  # noqa: PLR0124 NaN is not itself
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else f"{value}"


def share_text(value: float | None) -> str:
    """Return a share in three digits and at most four decimals, so that columns stay narrow."""
    return number(value if value is None else round(value, 4))


def range_text(mean: float | None, low: float | None, high: float | None, digits: int = 3) -> str:
    """Return a mean with the interval around it, if there is one."""
    if low is None or high is None:
        return number(mean, digits)
    return f"{number(mean, digits)} [{number(low, digits)}, {number(high, digits)}]"
