"""A matplotlib SVG made part of a page: its colours, its font, short."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_FONT = "font: 11px system-ui, sans-serif"
_JOINS = "stroke-linejoin: round; stroke-linecap: butt"
_UNSEEN = re.compile(r'<path d="[^"]*" style="fill: none"/>|<g\b[^>]*/>|<defs></defs>')
"""Grounds without a colour and groups without content."""
_MARKERS = re.compile(r"<g( [^>]*)?>((?:<use [^>]*/>)+)</g>")
_STYLE = re.compile(r' style="[^"]*"')


def for_page(document: str, name: str, ink: str) -> str:
    """Return the bare ``<svg>`` element: page colours, generic font, ids of its own, no links.

    Parameters
    ----------
    document
        SVG file of matplotlib, text as text.
    name
        Name of the figure; its ids begin with a short code of it.
    ink
        Colour that becomes the text colour of the page.
    """
    svg = document[document.index("<svg") :].rstrip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # A rule for all elements would reach those of the page: here it is inherited instead.
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"<svg [^>]*?viewBox=", f'<svg style="{_FONT}; {_JOINS}" viewBox=', svg, count=1)
    svg = svg.replace("xlink:href", "href").replace(ink, "currentColor")
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    code = f"i{zlib.crc32(name.encode()):x}"
    ids = {old: f"{code}-{number}" for number, old in enumerate(used)}
    # Tags alone: what is written in the picture stays as it is.
    svg = re.sub(r"<[^>]*>", lambda tag: _shorter(tag[0], ids), svg)
    svg = _UNSEEN.sub("", re.sub(r">\s+<", "><", svg).replace(' version="1.1"', "", 1))
    return _without_bare_groups(_MARKERS.sub(_styled_once, svg))


def _styled_once(group: re.Match[str]) -> str:
    """Return a group of markers with the style that all of them have."""
    found = set(_STYLE.findall(group[2]))
    if len(found) > 1 or "style" in (group[1] or ""):
        return group[0]
    return f"<g{group[1] or ''}{''.join(found)}>{_STYLE.sub('', group[2])}</g>"


def _shorter(tag: str, ids: Mapping[str, str]) -> str:
    """Return a tag with ids of the page, where they are used, and numbers to 0.01 pixels."""
    tag = re.sub(r' id="([^"]*)"', lambda one: f' id="{ids[one[1]]}"' if one[1] in ids else "", tag)
    tag = re.sub(r'(href="#|url\(#)([^")]+)', lambda one: one[1] + ids[one[2]], tag)
    tag = re.sub(r"font-size: 11px; font-family: [^;\"]*; ?", "", tag)
    tag = re.sub(r"-?\d+\.\d{3,}", lambda one: f"{float(one[0]):.2f}", tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
    tag = re.sub(r' d="([^"]*)"', lambda one: f' d="{_path(one[1])}"', tag)
    return re.sub(r"\s+", " ", tag)


def _path(commands: str) -> str:
    """Return the same path: no blanks around letters, no zeros after the point."""
    commands = re.sub(r"(\.\d*?)0+(?!\d)", lambda one: one[1].removesuffix("."), commands)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", commands).strip()


def _without_bare_groups(svg: str) -> str:
    """Return the same elements without groups that say nothing of what is in them."""
    parts: list[str] = []
    is_bare: list[bool] = []
    for part in re.split(r"(<g\b[^>]*>|</g>)", svg):
        if part.startswith("<g"):
            is_bare.append(part == "<g>")
            if is_bare[-1]:
                continue
        elif part == "</g>" and is_bare.pop():
            continue
        parts.append(part)
    return "".join(parts)
