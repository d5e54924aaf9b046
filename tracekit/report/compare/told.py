"""Differences in words: which cell, by how much, how surely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.compare.measures import KV, LAYERS, RECORDED, VOCAB
from tracekit.report.compare.names import short_names
from tracekit.report.compare.side import NO_PLACE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracekit.report.compare.pairs import Difference

_PLACES = {KV: "", VOCAB: " at {}", LAYERS: ", layer {}", RECORDED: ""}
"""How size or layer is said, by question."""

NO_INTERVAL = "no interval below 3 prompts"


_NAMED = 8
"""Names that a sentence lists; the rest is counted."""


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
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def number(value: float | None, *, signed: bool = False) -> str:
    """Return a number in three digits; '-' for none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    text = f"{value:+.3g}" if signed else f"{value:.3g}"
    large = abs(value) >= 1000
    return (f"{value:+.0f}" if signed else f"{value:.0f}") if large else text


def interval(one: Difference) -> str:
    """Return the ends of the interval of a difference; nothing where it has none."""
    low, high = one.interval.low, one.interval.high
    if low is None or high is None:
        return ""
    return f"[{number(low)}, {number(high)}]"


def told(one: Difference) -> str:
    """Return a difference in words: ``worse by 0.013 [+0.004, +0.021], n = 16``."""
    size = one.interval.mean
    if size is None:
        return f"{one.verdict} in {one.measure.name} ({one.level}), n = 0"
    unit = f" {one.measure.unit}" if one.measure.unit else ""
    change = number(abs(size)) if one.verdict in _SURE else number(size, signed=True)
    by = " by" if one.verdict in _SURE else ":"
    ends = interval(one) or f"({NO_INTERVAL})"
    return (
        f"{one.verdict}{by} {change} {ends}{unit} in {one.measure.name} ({one.level}), "
        f"n = {one.interval.n}"
    )


_SURE = ("better", "worse", "more", "less")
"""Verdicts whose interval leaves 0 out."""
