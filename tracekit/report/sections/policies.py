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
    from collections.abc import Hashable, Mapping

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
            "Each cell: mean over sequences, 95\u00a0% bootstrap interval in brackets, number of "
            "sequences. Levels have sequences of their own, so compare within a column. A policy "
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

    def of(self, points: list[Point], wanted: float) -> HtmlTable:
        """Return the table of some points."""
        rows = tuple(tuple(self._row(point, wanted).values()) for point in points)
        labels = list(self._row(points[0], wanted))
        return HtmlTable(
            name=f"policies-{100 * wanted:.0f}",
            caption=(
                f"Policies that were asked to keep about {percent(wanted)}; flags and bytes at "
                f"level {self.levels[0]}, order by level {self.levels[-1]}"
            ),
            columns=tuple(map(text_column, labels)),
            rows=rows,
        )

    def _row(self, point: Point, wanted: float) -> dict[str, Cell]:
        """Return the cells of a policy by the labels of their columns."""
        row = {
            "policy": cell(point.family),
            "kept": cell(self._kept(point), point.x),
        }
        for level in self.levels:
            found = self.points[level, KEY_MEASURES[level]].get(point.cell)
            text = compact(found, bare if level == "local" else short)
            noisy = level == "propagated" and found is not None and self._is_noise(found)
            row[_COLUMNS[level]] = cell(text + " \u2264\u00a0noise" * noisy, _mean(found))
        if "propagated" in self.levels:
            same = self.points["propagated", "same_top_frac"].get(point.cell)
            row["same top token (%), propagated"] = cell(compact(same, bare), _mean(same))
        if self.perplexity:
            change = self.perplexity.get(point.name)
            row["perplexity change (%), propagated"] = cell(compact(change, signed), _mean(change))
        held = self.points[self.levels[0], "kv_bytes"].get(point.cell)
        row["cache"] = cell(NOTHING if held is None else size(held.mean), _mean(held))
        row["schedule"] = cell(self._schedule(point))
        row["flags"] = cell(self._flags(point, wanted))
        return row

    def _kept(self, point: Point) -> str:
        """Return the kept fraction, by level where levels have sequences that differ in it."""
        kept = {level: self.points[level, "kept_frac"].get(point.cell) for level in self.levels}
        first, *others = [(level, one.mean) for level, one in kept.items() if one is not None]
        apart = [
            f"; {percent(mean)} {level}"
            for level, mean in others
            if abs(mean - first[1]) > KEPT_SHOWN
        ]
        return f"{percent(first[1])}" + (f" {first[0]}{''.join(apart[-1:])}" if apart else "")

    def _is_noise(self, point: Point) -> bool:
        noise = self.points["propagated", "noise_kl_nats"].get(point.cell)
        return noise is not None and point.mean <= noise.mean

    def _schedule(self, point: Point) -> str:
        about: Mapping[Any, Any] = self.about.get(point.name, {})
        saw: Mapping[Any, int] = about.get("query_aware", {})
        seen = "" if not saw else "; saw the question" if saw.get(True) else "; question unseen"
        if saw.get(True) and saw.get(False):
            seen = f"; saw the question in {saw[True]} of {sum(saw.values())}"
        return str(about.get("evict_at", NOTHING)).replace(",", ", ") + seen

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
