"""Token texts in which every character can be seen."""

from __future__ import annotations

import unicodedata

from tracekit.report.formats import visible

SPACE = "\u2423"
_NOTHING = "\u2205"
_CARRIER = "\u25cc"  # What a combining mark without a letter stands on.

_BLANK = (
    *range(0xFE00, 0xFE10),
    *range(0xE0100, 0xE01F0),
    *range(0x180B, 0x1810),
    0x034F,
    0x115F,
    0x1160,
    0x17B4,
    0x17B5,
    0x2800,
    0x3164,
    0xFFA0,
)
_WRITTEN_OUT = {code: f"<U+{code:04X}>" for code in _BLANK}
"""Letters, marks and variation selectors that draw nothing."""


def readable(text: str) -> str:
    r"""Return a token's text so that every character is seen: ``\n`` gets a mark and stays.

    Line feeds, tabs and lone spaces get a sign; control, format and bidi characters, blanks and
    unusual spaces are written out; marks without a letter get a carrier. The result is not yet
    escaped for HTML.
    """
    if not text:
        return _NOTHING
    if not text.strip(" "):
        return SPACE * len(text)
    marked = visible(text).replace("\n", "\u21b5\n").replace("\t", "\u21e5\t")
    shown = "".join(map(_shown, marked))
    if unicodedata.category(shown[0]).startswith("M"):
        shown = _CARRIER + shown
    # Traces hold line feeds written out: the line still ends there.
    return shown + "\n" if text.endswith(r"\n") else shown


def label(text: str) -> str:
    """Return a token's text for a line among others: no line feed, spaces with a sign."""
    return readable(text).replace("\n", "").replace("\t", "").replace(" ", SPACE)


def _shown(char: str) -> str:
    if char != " " and unicodedata.category(char) == "Zs":
        return f"<U+{ord(char):04X}>"
    return _WRITTEN_OUT.get(ord(char), char)
