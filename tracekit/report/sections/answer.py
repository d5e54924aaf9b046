"""The answer, first thing on the page: verdicts in sentences with numbers and intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.answers import kv_answer, layer_answer, vocab_answer
from tracekit.report.blocks import Block, Details, Framed, Heading, Items, Section, Text
from tracekit.report.claims import claims_table
from tracekit.report.estimates import between, cell
from tracekit.report.formats import percent
from tracekit.report.tables import HtmlTable, text_column
from tracekit.report.verdict.ranking import Ranking, ranking
from tracekit.report.verdict.yardstick import DOMAIN_PROMPTS, yardsticks

if TYPE_CHECKING:
    from tracekit.report.answers import Answer
    from tracekit.report.load import Point, Results
    from tracekit.report.options import Options
    from tracekit.report.tables import Cell


def section(results: Results, options: Options) -> Section:
    """Return the answers to both questions, what each policy needs, and the claims under test."""
    rankings = [ranking(results, one) for one in yardsticks(results, options)]
    answers = [
        kv_answer(results, options, rankings),
        layer_answer(results),
        vocab_answer(results),
    ]
    framed = [block for answer in answers if answer for block in _shown(answer)]
    blocks: list[Block] = [Framed(blocks=tuple(framed))] if framed else []
    if not framed:
        text = "These results answer neither question: no policy and no estimator was replayed."
        blocks.append(Text(text=text, look="verdict"))
    if rankings:
        tables = tuple(map(_needs, rankings))
        blocks.append(Details(summary="What each policy needs, level by level", blocks=tables))
    blocks.append(claims_table(results, options))
    return Section(name="answer", title="The answer", short="Answer", blocks=tuple(blocks))


def _shown(answer: Answer) -> list[Block]:
    blocks: list[Block] = [
        Heading(text=answer.question),
        Text(text=answer.verdict, look="verdict"),
    ]
    if answer.findings:
        blocks.append(Items(items=answer.findings))
    return [*blocks, Text(text=answer.rule, look="rule")]


def _needs(ranked: Ranking) -> HtmlTable:
    """Return of each policy the smallest passing fraction, or that none passes."""
    yardstick = ranked.yardstick
    rows = [_row(ranked, point, "passes from here on") for point in ranked.passed]
    rows += [_row(ranked, point, "passes nowhere; the most measured") for point in ranked.failed]
    few = f"no verdict below {DOMAIN_PROMPTS} prompts; the most measured"
    rows += [_row(ranked, point, few) for point in ranked.unjudged]
    caption = (
        f"Level {yardstick.level}: the smallest measured kept fraction from which on the upper end "
        f"of the interval stays below {yardstick.write(yardstick.bound)}{yardstick.unit}; bounds "
        "are left out; n counts prompts"
    )
    labels = ("policy", "kept", f"{yardstick.name}, 95\u00a0% interval, n", "verdict")
    return HtmlTable(
        name=f"answer-needs-{yardstick.level}",
        caption=caption,
        columns=tuple(map(text_column, labels)),
        rows=tuple(rows),
    )


def _row(ranked: Ranking, point: Point, verdict: str) -> tuple[Cell, ...]:
    write = ranked.yardstick.write
    return (
        cell(point.family),
        cell(percent(point.x), point.x),
        cell(f"{write(point.mean)} {between(point, write)}", point.mean),
        cell(verdict),
    )
