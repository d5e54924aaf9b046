"""Policies that were asked to keep about the same, a row each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracekit.report.estimates import cell, compact
from tracekit.report.formats import NOTHING, percent, size
from tracekit.report.load import KEY_MEASURES
from tracekit.report.sections.policies.measured import COLUMNS
from tracekit.report.tables import Cell, HtmlTable, text_column

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from tracekit.report.load import Point
    from tracekit.report.sections.policies.measured import Measured

WANTED_FRACS = (0.10, 0.25, 0.50)
"""Kept fractions asked for at which policies are compared."""

KEPT_SHOWN = 0.005
"""Kept fractions of two levels that differ by more are both written."""

ASKED_SHOWN = 0.001
"""Asked fractions that differ by more from that of the table are written in their row."""


@dataclass(frozen=True)
class Policies:
    """Tables of policies, one a fraction that was asked for."""

    measured: Measured

    @cached_property
    def about(self) -> dict[str, dict[Hashable, Any]]:
        """Schedule, and how many sequences have which flag, by policy, at the first level."""
        rows = self.measured.results.whole
        rows = rows[rows["level"] == self.measured.levels[0]]
        found = rows.groupby("policy", sort=True).agg(
            evict_at=("evict_at", "first"),
            query_aware=("query_aware", lambda values: Counter(values.dropna())),
            selects=("selects", "first"),
            clipped=("is_clipped", "sum"),
            clamped=("is_clamped", "sum"),
            cells=("sequence_id", "size"),
        )
        return {str(name): row for name, row in found.to_dict("index").items()}

    @property
    def legend(self) -> str:
        """What the columns are, once for the three tables."""
        perplexity = (
            "Perplexity is told of given text only."
            if self.measured.perplexity
            else "There is no column of perplexity: no given text was run at level propagated."
        )
        return (
            "Each cell: mean over sequences, 95\u00a0% bootstrap interval in brackets; n, the number of "
            "sequences, stands in the head of the column where it is the same in all rows. Levels have sequences of their own, so compare within a column. A policy "
            "stands where its asked fraction is nearest, least loss first. Kept is bytes held over "
            "those of the full cache, generated tokens included. Clipped: the budget was smaller "
            "than what is protected, so that scores had no say. Clamped: the budget was larger than "
            "the cache. Idle: nothing was evicted, left out of the mean. A bound looks at later "
            "rows: no decoder has it. \u201c\u2264\u00a0noise\u201d: not above what rounding alone "
            f"does. {perplexity}"
        )

    def near(self, wanted: float) -> list[Point]:
        """Return a point a policy: of those nearest this of the wanted fractions, the nearest."""
        found = []
        for curve in self.measured.curves.values():
            able = [point for point in curve if _home(point) == wanted]
            if able:
                found.append(min(able, key=lambda point: abs(point.asked - wanted)))
        return sorted(found, key=self._loss)

    def _loss(self, point: Point) -> tuple[float, str]:
        """Return the mean at the highest level, for the order of rows."""
        level = self.measured.levels[-1]
        found = self.measured.points[level, KEY_MEASURES[level]].get(point.cell)
        return (math.inf if found is None else found.mean), point.family

    def of(self, points: list[Point], wanted: float) -> HtmlTable:
        """Return the table of some points."""
        seen = {self._seen(point) for point in points}
        shared = seen.pop() if len(seen) == 1 else ""
        sizes = {one.label: one.size(points) for one in self.measured.measures}
        rows = [self._row(point, wanted, sizes, told=not shared) for point in points]
        return HtmlTable(
            name=f"policies-{100 * wanted:.0f}",
            caption=(
                f"Policies that were asked to keep about {percent(wanted)}; flags and bytes at "
                f"level {self.measured.levels[0]}, order by level {self.measured.levels[-1]}"
                + (f". All of them {shared}" if shared else "")
            ),
            columns=tuple(text_column(label + _of(sizes.get(label))) for label in rows[0]),
            rows=tuple(tuple(row.values()) for row in rows),
        )

    def _row(
        self, point: Point, wanted: float, sizes: Mapping[str, int | None], *, told: bool
    ) -> dict[str, Cell]:
        """Return the cells of a policy by the labels of their columns.

        ``sizes`` has the n that stands in the head of a column; ``told``: whether the schedule says
        what the policy saw of the question.
        """
        row = {
            "policy": cell(point.family),
            f"kept, {self._kept_levels}": cell(self._kept(point), point.x),
        }
        for one in self.measured.measures:
            found = one.of(point)
            text = compact(found, one.write)
            if found is not None and sizes[one.label] is not None:
                text = text.removesuffix(f" n={found.n}")
            if found is not None and one.label == COLUMNS["propagated"] and self._is_noise(found):
                text += " \u2264\u00a0noise"
            row[one.label] = cell(text, _mean(found))
        held = self.measured.points[self.measured.levels[0], "kv_bytes"].get(point.cell)
        row["cache"] = cell(NOTHING if held is None else size(held.mean), _mean(held))
        seen = self._seen(point) if told else ""
        row["schedule"] = cell(self._schedule(point) + (f"; {seen}" if seen else ""))
        row["flags"] = cell(self._flags(point, wanted))
        return row

    @property
    def _kept_levels(self) -> str:
        """Whose kept fractions stand in a cell: levels may have sequences that differ in it."""
        return " | ".join(dict.fromkeys((self.measured.levels[0], self.measured.levels[-1])))

    def _kept(self, point: Point) -> str:
        """Return the kept fraction, at the first and the last level where they differ."""
        first, last = (
            self.measured.points[level, "kept_frac"].get(point.cell)
            for level in (self.measured.levels[0], self.measured.levels[-1])
        )
        x = point.x if first is None else first.mean
        if last is None or abs(x - last.mean) <= KEPT_SHOWN:
            return percent(x)
        return f"{percent(x)} | {percent(last.mean)}"

    def _is_noise(self, point: Point) -> bool:
        noise = self.measured.points["propagated", "noise_kl_nats"].get(point.cell)
        return noise is not None and point.mean <= noise.mean

    def _schedule(self, point: Point) -> str:
        return str(self.about.get(point.name, {}).get("evict_at", NOTHING)).replace(",", ", ")

    def _seen(self, point: Point) -> str:
        """Return whether the question was read before the policy evicted."""
        saw: Mapping[Any, int] = self.about.get(point.name, {}).get("query_aware", {})
        if saw.get(True) and saw.get(False):
            return f"saw the question in {saw[True]} of {sum(saw.values())}"
        return "saw the question" if saw.get(True) else "question unseen" if saw else ""

    def _flags(self, point: Point, wanted: float) -> str:
        about: Mapping[Any, Any] = self.about.get(point.name, {})
        flags = [] if point.causal else ["bound"]
        if abs(point.asked - wanted) > ASKED_SHOWN:
            flags.append(f"asked {percent(point.asked)}")
        if about.get("selects"):
            flags.append(f"recall: frees nothing, reads {percent(point.x)}")
        flags += [
            f"{name} {about[name]} of {about['cells']}"
            for name in ("clipped", "clamped")
            if about.get(name)
        ]
        if point.num_excluded:
            flags.append(f"idle {point.num_excluded}, left out")
        return "; ".join(flags)


def _of(n: int | None) -> str:
    return "" if n is None else f", n\u00a0=\u00a0{n}"


def _home(point: Point) -> float:
    return min(WANTED_FRACS, key=lambda wanted: abs(point.asked - wanted))


def _mean(point: Point | None) -> float:
    return math.nan if point is None else point.mean
