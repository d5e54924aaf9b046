"""Domain by domain at about half the cache, level by level, and which domain breaks first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit.report.blocks import Absent, Block, Details, Heading, Section, Text
from tracekit.report.estimates import bare, cell, compact, short
from tracekit.report.formats import percent
from tracekit.report.tables import Cell, HtmlTable, text_column
from tracekit.report.verdict.breaking import first_to_break
from tracekit.report.verdict.compared import at_fraction, in_domains
from tracekit.report.verdict.prompts import prompts
from tracekit.report.verdict.ranking import ranking
from tracekit.report.verdict.yardstick import COMPARED_FRAC, DOMAIN_PROMPTS, yardsticks

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options
    from tracekit.report.verdict.yardstick import Yardstick

MOST_POLICIES = 6
"""Policies beside each other; the others are left out, and counted."""


def section(results: Results, options: Options) -> Section | Absent:
    """Return one table a level, and the domain that breaks first where there are prompts enough.

    The highest level is open, the others are folded.
    """
    blocks: list[Block] = []
    if results.domains("kv"):
        for yardstick in yardsticks(results, options):
            told = _level(results, yardstick)
            if told and blocks:
                told = [Details(summary=f"The same at level {yardstick.level}", blocks=tuple(told))]
            blocks += told
    if not blocks:
        return Absent(
            what="Domains: no policy that evicts was replayed",
            command="tracekit simulate TRACE -o RESULTS --level local,predicted,propagated",
        )
    return Section(name="domains", title="Domain by domain", short="Domains", blocks=tuple(blocks))


def _level(results: Results, yardstick: Yardstick) -> list[Block]:
    """Return the blocks of one level; none if no policy evicts."""
    found = at_fraction(results, yardstick, COMPARED_FRAC)
    if not found:
        return []
    best = sorted(found.values(), key=lambda point: (point.mean, point.family))
    return [
        Heading(text=f"Level {yardstick.level}"),
        Text(text=first_to_break(results, yardstick)),
        _table(results, yardstick, best[:MOST_POLICIES], len(best)),
    ]


def _table(
    results: Results, yardstick: Yardstick, chosen: list[Point], num_policies: int
) -> HtmlTable:
    """Return the losses of the chosen policies in each domain."""
    have = prompts(results, yardstick.level)
    by_policy = [in_domains(results, yardstick, point) for point in chosen]
    rows = []
    for domain in (one for one in results.domains("kv") if one in have):
        there = [by_domain.get(domain) for by_domain in by_policy]
        rows.append(
            (
                cell(domain),
                cell(str(have[domain]), have[domain]),
                *(_loss(point, yardstick) for point in there),
                _verdict(results, yardstick, domain, have[domain]),
            )
        )
    unit = "nats a token" if yardstick.unit else "%"
    others = num_policies - len(chosen)
    caption = (
        f"{yardstick.name[0].upper()}{yardstick.name[1:]} ({unit}) by domain, level "
        f"{yardstick.level}, where the fraction asked for is nearest {percent(COMPARED_FRAC)}: mean, "
        "95\u00a0% interval, prompts; least loss over all domains first. Needs: the smallest "
        "measured kept fraction from which on a policy that evicts stays below "
        f"{yardstick.write(yardstick.bound)} with its interval; no verdict below {DOMAIN_PROMPTS} "
        f"prompts. Bounds are left out{f', and {others} more policies' if others else ''}."
    )
    return HtmlTable(
        name=f"domains-{yardstick.level}",
        caption=caption,
        columns=tuple(
            map(text_column, ("domain", "prompts", *(one.family for one in chosen), "needs"))
        ),
        rows=tuple(rows),
    )


def _loss(point: Point | None, yardstick: Yardstick) -> Cell:
    write = bare if yardstick.level == "local" else short
    return cell(compact(point, write), math.nan if point is None else point.mean)


def _verdict(results: Results, yardstick: Yardstick, domain: str, num_prompts: int) -> Cell:
    if num_prompts < DOMAIN_PROMPTS:
        return cell("no verdict")
    ranked = ranking(results, yardstick, domain=domain)
    need = ranked.evicting
    if ranked.is_thin:
        return cell("no verdict")
    if need is None:
        return cell("no measured fraction", 1)
    return cell(f"{percent(need.x)} with {need.family}", need.x)
