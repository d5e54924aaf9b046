"""Cells and differences in words: names as short as tells them apart, numbers, sentences.

Names are compared as texts: canonical ones say all that a policy is, and engines need torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.report.compare.measures import KV, LAYERS, RECORDED, VOCAB
from tracekit.report.compare.side import NO_PLACE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracekit.report.compare.pairs import Difference

AGAINST = " against "
"""Between the two texts of a pair of policies; such names are short as they are."""

_ALWAYS = "kept"
"""The parameter that is shown even where all have the same."""

_PLACES = {KV: "", VOCAB: " at {}", LAYERS: ", layer {}", RECORDED: ""}
"""How size or layer is said, by question."""

_LISTED = 8
"""Names that a sentence lists; the rest is counted."""

_LARGE = 999.5
"""Numbers from which on three digits would need an exponent."""

_SURE = ("better", "worse", "more", "less")
"""Verdicts whose interval leaves 0 out."""


@dataclass(frozen=True)
class Piece:
    """A name in a text with its parameters, and the sign before it: ``+``, ``@`` or nothing."""

    sign: str
    head: str
    parameters: tuple[str, ...]


def pieces(text: str) -> tuple[Piece, ...]:
    """Return the pieces of the text of a policy or scheme."""
    found = []
    signs_and_texts = re.split(r"([+@])", text)
    for sign, piece in zip(["", *signs_and_texts[1::2]], signs_and_texts[::2], strict=True):
        head, _, parameters = piece.partition(":")
        found.append(Piece(sign, head, tuple(filter(None, parameters.split(",")))))
    return tuple(found)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return by canonical text a shorter one that no other of these texts shares.

    Parameters that all texts of the same pieces have alike are left out, the kept fraction is not.
    """
    unique = sorted(set(names))
    split = {name: pieces(name) for name in unique if AGAINST not in name}
    alike: dict[tuple[tuple[str, str], ...], list[tuple[Piece, ...]]] = {}
    for found in split.values():
        alike.setdefault(_skeleton(found), []).append(found)
    pairs = {name: name for name in unique if AGAINST in name}
    return pairs | {name: _short(found, alike[_skeleton(found)]) for name, found in split.items()}


def _skeleton(found: tuple[Piece, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((one.sign, one.head) for one in found)


def _short(found: tuple[Piece, ...], alike: list[tuple[Piece, ...]]) -> str:
    written = []
    for place, piece in enumerate(found):
        shared = set.intersection(*(set(other[place].parameters) for other in alike))
        told = [
            one
            for one in piece.parameters
            if one not in shared or (one.partition("=")[0] == _ALWAYS and place == 0)
        ]
        written.append(piece.sign + piece.head + (":" if told else "") + ",".join(told))
    return "".join(written)


class ShortNames:
    """What cells are called: as short as tells them apart from all others of their question.

    Parameters
    ----------
    names
        Question and name of each cell; a policy and a candidate set may have one name.
    """

    def __init__(self, names: Iterable[tuple[str, str]]) -> None:
        by_question: dict[str, list[str]] = {}
        for question, name in names:
            by_question.setdefault(question, []).append(name)
        self._short = {question: short_names(found) for question, found in by_question.items()}

    def name(self, question: str, name: str) -> str:
        """Return the short name of a policy, scheme or rule."""
        return self._short[question][name]

    def cell(self, one: Difference) -> str:
        """Return the short name of a cell with its size or layer, bounds named so."""
        question = one.measure.question
        place = _PLACES[question].format(one.place) if one.place != NO_PLACE else ""
        return f"{self.name(question, one.name)}{place}{'' if one.is_causal else ' (bound)'}"


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more


def number(value: float | None, *, signed: bool = False) -> str:
    """Return a number in three digits; '-' for none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = ".0f" if abs(value) >= _LARGE else ".3g"
    return f"{value:{'+' if signed else ''}{digits}}"


def interval(one: Difference) -> str:
    """Return the ends of the interval of a difference; nothing where it has none."""
    low, high = one.interval.low, one.interval.high
    return "" if low is None or high is None else f"[{number(low)}, {number(high)}]"


def told(one: Difference) -> str:
    """Return a difference in words: ``worse by 0.013 [0.004, 0.021] in kl_nats (...), n = 16``."""
    size, n = one.interval.mean, one.interval.n
    where = f"in {one.measure.name} ({one.level}), n = {n}"
    if size is None:
        return f"{one.verdict} {where}"
    is_sure = one.verdict in _SURE
    change = f" by {number(abs(size))}" if is_sure else f": {number(size, signed=True)}"
    ends = interval(one) or "(no interval below 3 prompts)"
    unit = f" {one.measure.unit}" if one.measure.unit else ""
    return f"{one.verdict}{change} {ends}{unit} {where}"
