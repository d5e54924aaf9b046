"""Every policy at three kept fractions, each level of truth in columns of its own."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracekit.measure.stats import bootstrap_mean
from tracekit.report.blocks import Absent, Block, Heading, Section, Text
from tracekit.report.estimates import bare, cell, compact, short, signed
from tracekit.report.formats import NOTHING, percent, size
from tracekit.report.load import KEY_MEASURES, Point, Results
from tracekit.report.stacked import stacked
from tracekit.report.tables import Cell, HtmlTable, text_column

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    import numpy as np

    from tracekit.report.options import Options

WANTED_FRACS = (0.10, 0.25, 0.50)
"""Kept fractions asked for at which policies are compared."""

KEPT_SHOWN = 0.005
"""Kept fractions of two levels that differ by more are both written."""

ASKED_SHOWN = 0.001
"""Asked fractions that differ by more from that of the table are written in their row."""

COMMAND = "tracekit simulate TRACE -o RESULTS --level local,predicted,propagated"

_COLUMNS = {
    "local": "output error (%), local",
    "predicted": "KL (nats), predicted",
    "propagated": "KL (nats), propagated",
}


def section(results: Results, options: Options) -> Section | Absent:
    """Return the tables of policies."""
    del options
    if not any(level in results.levels for level in _COLUMNS):
        return Absent(what="Policies: none was replayed", command=COMMAND)
    table = _Policies(results)
    blocks: list[Block] = [Text(text=table.legend, look="note")]
    for wanted in WANTED_FRACS:
        if points := table.near(wanted):
            blocks += [
                Heading(text=f"Asked to keep about {percent(wanted)}"),
                table.of(points, wanted),
            ]
    blocks += stacked(results)
    return Section(
        name="policies",
        title="Policies at three kept fractions",
        short="Policies",
        blocks=tuple(blocks),
    )


@dataclass(frozen=True)
class _Policies:
    """What the tables share: points of all levels by policy text."""

    results: Results

    @cached_property
    def levels(self) -> tuple[str, ...]:
        return tuple(level for level in _COLUMNS if level in self.results.levels)

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """Points by policy, at the level that has most of them."""
        return self._lines(self.levels[0], KEY_MEASURES[self.levels[0]])

    def _lines(self, level: str, measure: str) -> dict[str, list[Point]]:
        lines = (
            self.results.curves("kv", measure, level=level, x_name=x_name)
            for x_name in ("kept_frac", "read_frac")
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
            one: {point.cell: point for curve in self._lines(*one).values() for point in curve}
            for one in wanted
        }

    @cached_property
    def about(self) -> dict[str, dict[Hashable, Any]]:
        """Schedule, and how many sequences have which flag, by policy, at the first level."""
        rows = self.results.whole
        rows = rows[rows["level"] == self.levels[0]]
        found = rows.groupby("policy", sort=True).agg(
            evict_at=("evict_at", "first"),
            query_aware=("query_aware", lambda values: Counter(values.dropna())),
            selects=("selects", "first"),
            clipped=("is_clipped", "sum"),
            clamped=("is_clamped", "sum"),
            cells=("sequence_id", "size"),
        )
        return {str(name): row for name, row in found.to_dict("index").items()}

    @cached_property
    def given(self) -> set[str]:
        """Sequences of given text: those of generated text have no perplexity worth telling."""
        return {
            one["sequence_id"]
            for one in self.results.run["sequences"]
            if one["text_source"] == "given"
        }

    @cached_property
    def perplexity(self) -> dict[str, Point]:
        """Relative change of the perplexity of given text, by policy."""
        rows = self.results.whole
        rows = rows[(rows["level"] == "propagated") & rows["sequence_id"].isin(self.given)]
        rows = rows[~rows["is_idle"].eq(True)]
        change = (rows["nll_pruned"] - rows["nll_full"]).astype(float)
        return {
            str(name): _perplexity(str(name), values.to_numpy(), self.results.run["seed"])
            for name, values in change.groupby(rows["policy"])
            if values.notna().any()
        }

    @property
    def legend(self) -> str:
        """What the columns are, once for the three tables."""
        perplexity = (
            "Perplexity is told of given text only."
            if self.perplexity
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
        for curve in self.curves.values():
            able = [point for point in curve if _home(point) == wanted]
            if able:
                found.append(min(able, key=lambda point: abs(point.asked - wanted)))
        return sorted(found, key=self._loss)

    def _loss(self, point: Point) -> tuple[float, str]:
        """Return the mean at the highest level, for the order of rows."""
        level = self.levels[-1]
        found = self.points[level, KEY_MEASURES[level]].get(point.cell)
        return (math.inf if found is None else found.mean), point.family

    @cached_property
    def measures(self) -> tuple[_Measure, ...]:
        """Columns of means, each of one level."""
        found = [
            _Measure(_COLUMNS[level], self.points[level, KEY_MEASURES[level]], write)
            for level, write in zip(_COLUMNS, (bare, short, short), strict=True)
            if level in self.levels
        ]
        if "propagated" in self.levels:
            same = self.points["propagated", "same_top_frac"]
            found.append(_Measure("same top token (%), propagated", same, bare))
        if self.perplexity:
            change = {(name, ""): point for name, point in self.perplexity.items()}
            found.append(_Measure("perplexity change (%), propagated", change, signed))
        return tuple(found)

    def of(self, points: list[Point], wanted: float) -> HtmlTable:
        """Return the table of some points."""
        seen = {self._seen(point) for point in points}
        shared = seen.pop() if len(seen) == 1 else ""
        sizes = {one.label: one.size(points) for one in self.measures}
        rows = [self._row(point, wanted, sizes, told=not shared) for point in points]
        return HtmlTable(
            name=f"policies-{100 * wanted:.0f}",
            caption=(
                f"Policies that were asked to keep about {percent(wanted)}; flags and bytes at "
                f"level {self.levels[0]}, order by level {self.levels[-1]}"
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
        for one in self.measures:
            found = one.of(point)
            text = compact(found, one.write)
            if found is not None and sizes[one.label] is not None:
                text = text.removesuffix(f" n={found.n}")
            if found is not None and one.label == _COLUMNS["propagated"] and self._is_noise(found):
                text += " \u2264\u00a0noise"
            row[one.label] = cell(text, _mean(found))
        held = self.points[self.levels[0], "kv_bytes"].get(point.cell)
        row["cache"] = cell(NOTHING if held is None else size(held.mean), _mean(held))
        seen = self._seen(point) if told else ""
        row["schedule"] = cell(self._schedule(point) + (f"; {seen}" if seen else ""))
        row["flags"] = cell(self._flags(point, wanted))
        return row

    @property
    def _kept_levels(self) -> str:
        """Whose kept fractions stand in a cell: levels may have sequences that differ in it."""
        return " | ".join(dict.fromkeys((self.levels[0], self.levels[-1])))

    def _kept(self, point: Point) -> str:
        """Return the kept fraction, at the first and the last level where they differ."""
        first, last = (
            self.points[level, "kept_frac"].get(point.cell)
            for level in (self.levels[0], self.levels[-1])
        )
        x = point.x if first is None else first.mean
        if last is None or abs(x - last.mean) <= KEPT_SHOWN:
            return percent(x)
        return f"{percent(x)} | {percent(last.mean)}"

    def _is_noise(self, point: Point) -> bool:
        noise = self.points["propagated", "noise_kl_nats"].get(point.cell)
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


@dataclass(frozen=True)
class _Measure:
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


def _of(n: int | None) -> str:
    return "" if n is None else f", n\u00a0=\u00a0{n}"


def _home(point: Point) -> float:
    return min(WANTED_FRACS, key=lambda wanted: abs(point.asked - wanted))


def _mean(point: Point | None) -> float:
    return math.nan if point is None else point.mean


def _perplexity(name: str, change_S: np.ndarray, seed: int) -> Point:
    """Return exp(mean change of nll) - 1 with its interval."""
    found = bootstrap_mean(change_S, seed=seed)
    ends = (
        math.nan if end is None else math.expm1(end) for end in (found.mean, found.low, found.high)
    )
    mean, low, high = ends
    return Point(
        name, name, "propagated", True, "", math.nan, math.nan, mean, low, high, found.n, 0
    )
