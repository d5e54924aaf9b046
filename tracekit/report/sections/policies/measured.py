"""What was measured of policies: their means by level, each level in columns of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tracekit.report.estimates import bare, short, signed
from tracekit.report.figures.perplexity import perplexity_changes
from tracekit.report.load import KEY_MEASURES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracekit.report.load import Point, Results

COLUMNS = {
    "local": "output error (%), local",
    "predicted": "KL (nats), predicted",
    "propagated": "KL (nats), propagated",
}
"""Heads of the columns, by level."""

_X_NAMES = ("kept_frac", "read_frac")


@dataclass(frozen=True)
class Measure:
    """A column of means: its label, its points by cell, and how one is written."""

    label: str
    points: Mapping[tuple[str, str], Point]
    write: Callable[[float], str]

    def of(self, point: Point) -> Point | None:
        """Return the mean of a policy; perplexities are by its text alone."""
        return self.points.get(point.cell, self.points.get((point.name, "")))

    def size(self, points: list[Point]) -> int | None:
        """Return the number of sequences that all means have; None where they differ."""
        sizes = {found.n for point in points if (found := self.of(point)) is not None}
        return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True)
class Measured:
    """What the tables share: points of all levels by policy text."""

    results: Results

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """Levels that have columns, in the order of these."""
        return tuple(level for level in COLUMNS if level in self.results.levels)

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """Points by policy, at the level that has most of them."""
        return self.lines(self.levels[0], KEY_MEASURES[self.levels[0]])

    def lines(self, level: str, measure: str) -> dict[str, list[Point]]:
        """Return the curves of what frees memory and of what reads less."""
        lines = (
            self.results.curves("kv", measure, level=level, x_name=x_name) for x_name in _X_NAMES
        )
        return {family: curve for found in lines for family, curve in found.items()}

    @cached_property
    def points(self) -> dict[tuple[str, str], dict[tuple[str, str], Point]]:
        """By level and measure, then by cell."""
        wanted = [(level, KEY_MEASURES[level]) for level in self.levels]
        wanted += [(level, "kept_frac") for level in self.levels]
        wanted += [(self.levels[0], "kv_bytes")]
        wanted += [("propagated", name) for name in ("same_top_frac", "noise_kl_nats")]
        return {
            one: {point.cell: point for curve in self.lines(*one).values() for point in curve}
            for one in wanted
        }

    @cached_property
    def perplexity(self) -> dict[tuple[str, str], Point]:
        """Change of the perplexity of given text; the text of a policy tells its size."""
        return {
            (point.name, ""): point
            for x_name in _X_NAMES
            for curve in perplexity_changes(self.results, x_name).values()
            for point in curve
        }

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """Columns of means, each of one level."""
        found = [
            Measure(COLUMNS[level], self.points[level, KEY_MEASURES[level]], write)
            for level, write in zip(COLUMNS, (bare, short, short), strict=True)
            if level in self.levels
        ]
        if "propagated" in self.levels:
            same = self.points["propagated", "same_top_frac"]
            found.append(Measure("same top token (%), propagated", same, bare))
        if self.perplexity:
            found.append(Measure("perplexity change (%), propagated", self.perplexity, signed))
        return tuple(found)
