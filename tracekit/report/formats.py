"""How numbers and texts are written in a report."""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

NOTHING = "n/a"
"""Written where a value does not apply."""

_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def number(value: float, digits: int = 3) -> str:
    """Return ``value`` with so many significant digits; 'n/a' for null."""
    return NOTHING if math.isnan(value) else f"{value:.{digits}g}"


def count(value: float) -> str:
    """Return a whole number with thin groups of three: ``8 192``."""
    return NOTHING if math.isnan(value) else f"{value:,.0f}".replace(",", "\u202f")


def percent(frac: float, digits: int | None = None) -> str:
    """Return a fraction as a percentage; finer near 0 % and below 100 %, where the tails matter."""
    if math.isnan(frac):
        return NOTHING
    value = 100 * frac
    if digits is None:
        rest = min(abs(value), abs(100 - value)) if value < 100 else value
        digits = 0 if rest >= 10 or rest == 0 else 1 if rest >= 1 else 2
    return f"{value:.{digits}f}\u00a0%"


def size(num_bytes: float) -> str:
    """Return bytes with the largest binary unit that leaves a number of 1 or more."""
    if math.isnan(num_bytes):
        return NOTHING
    power = 0 if num_bytes < 1 else min(4, int(math.log2(num_bytes) // 10))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    value = num_bytes / 1024**power
    text = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{text}\u00a0{unit}"


def percent_range(low: float, high: float) -> str:
    """Return an interval of fractions: ``7.0 to 9.4 %``; 'n/a' for null."""
    if math.isnan(low):
        return NOTHING
    return f"{percent(low).removesuffix('%')}to\u00a0{percent(high)}"


def evidence(low: float, high: float, n: int) -> str:
    """Return how sure a mean of fractions is: its interval and n, or why there is none."""
    interval = "no interval below 3 sequences" if math.isnan(low) else percent_range(low, high)
    return f"{interval}, n\u00a0=\u00a0{n}"


def sample_sizes(sizes: Collection[int]) -> str:
    """Return ``n = 16``, or ``n = 4 to 16`` where they differ."""
    low, high = min(sizes), max(sizes)
    return f"n\u00a0=\u00a0{low}" + (f" to {high}" if high > low else "")


def visible(text: str) -> str:
    """Return ``text`` with control, format and bidi characters written out: ``<U+202E>``.

    Line feeds and tabs are left as they are. The result is not yet escaped for HTML.
    """
    if text.isprintable():
        return text
    return "".join(
        f"<U+{ord(char):04X}>"
        if unicodedata.category(char) in _HIDDEN_CATEGORIES and char not in "\n\t"
        else char
        for char in text
    )
