"""A matplotlib SVG made part of a page: its colours, its font, short."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_FONT = "font: 11px system-ui, sans-serif"


def for_page(document: str, name: str, ink: str) -> str:
    """Return the bare ``<svg>`` element: page colours, generic font, ids of its own, no links.

    Parameters
    ----------
    document
        SVG file of matplotlib, text as text.
    name
        Beginning of its ids.
    ink
        Colour that becomes the text colour of the page.
    """
    svg = document[document.index("<svg") :].rstrip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"<svg [^>]*?viewBox=", f'<svg style="{_FONT}" viewBox=', svg, count=1)
    svg = svg.replace("xlink:href", "href").replace(ink, "currentColor")
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    ids = {old: f"{name}-{number}" for number, old in enumerate(used)}
    # Tags alone: what is written in the picture stays as it is.
    svg = re.sub(r"<[^>]*>", lambda tag: _shorter(tag[0], ids), svg)
    return re.sub(r">\s+<", "><", svg)


def _shorter(tag: str, ids: Mapping[str, str]) -> str:
    """Return a tag with ids of the page, where they are used, and numbers to 0.01 pixels."""
    tag = re.sub(r' id="([^"]*)"', lambda one: f' id="{ids[one[1]]}"' if one[1] in ids else "", tag)
    tag = re.sub(r'(href="#|url\(#)([^")]+)', lambda one: one[1] + ids[one[2]], tag)
    tag = re.sub(r"font-size: 11px; font-family: [^;\"]*; ?", "", tag)
    tag = re.sub(r"-?\d+\.\d{3,}", lambda one: f"{float(one[0]):.2f}", tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
    return re.sub(r"\s+", " ", tag)
