"""Which tokens need a logit: what candidate sets cover, miss, read and gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Absent, Details, Heading, Items, Section, Text
from tracekit.report.figures.cost_curve import cost_curve
from tracekit.report.figures.coverage import ARGMAX, MASS, coverage
from tracekit.report.figures.tails import tails
from tracekit.report.sections.vocabulary.attended import drift, foretelling
from tracekit.report.sections.vocabulary.controllers import controllers
from tracekit.report.sections.vocabulary.cost import batches, findings
from tracekit.report.sections.vocabulary.estimators import by_domain, estimators, percentiles
from tracekit.report.sections.vocabulary.misses import misses
from tracekit.report.sections.vocabulary.named import named
from tracekit.report.sections.vocabulary.verdicts import few, reasons, sentences, verdicts
from tracekit.report.verdict.schemes import with_family
from tracekit.schema import CANDIDATES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.blocks import Block
    from tracekit.report.load import Results
    from tracekit.report.options import Options
    from tracekit.report.sections.vocabulary.named import Named

_COMMAND = "tracekit simulate TRACE -o RESULTS --vocab frequency --vocab previous --vocab lowrank"


def section(results: Results, options: Options) -> Section | Absent:
    """Return what candidate sets keep of the vocabulary, and what they cost."""
    del options
    absent = Absent(what="Which tokens need a logit: candidate sets", command=_COMMAND)
    sets = _sets(results) if results.curves("vocab", "hit_argmax") else [absent]
    attended: list[Block] = [
        *_titled("Does attention point at the next token?", foretelling(results)),
        *_titled("Do anchors drift?", _folded("Drift by tokens seen", drift(results))),
    ]
    if sets == [absent] and not attended:
        return absent
    attended = attended or [
        Absent(
            what="Whether attention points at the next token",
            command="tracekit simulate TRACE -o RESULTS --attention",
        )
    ]
    return Section(
        name="vocabulary",
        title="Vocabulary: which tokens need a logit",
        short="Vocabulary",
        blocks=(*sets, *attended),
    )


def _sets(results: Results) -> list[Block]:
    """Return what candidate sets cover, miss and cost."""
    chosen = named(results)
    return [
        *_answer(results, chosen),
        *_figures(results, chosen),
        *_by_domain(results, chosen),
        *_titled("What is missed", misses(results, chosen)),
        *_titled("Sizes set at each step", _folded("Gains, size by size", controllers(results))),
    ]


def _answer(results: Results, chosen: Named) -> list[Block]:
    items = tuple(findings(results, chosen))
    found: list[Block] = [Text(text=one, look="verdict") for one in sentences(results)]
    return [*found, Items(items=items)] if items else found


def _figures(results: Results, chosen: Named) -> list[Block]:
    rows = results.table(CANDIDATES)
    at_size = with_family(results, rows[rows["size"] == chosen.size])
    probability = coverage(results, MASS, chosen.looks, chosen.size)
    batched = batches(results, chosen)
    blocks = (
        Text(text=chosen.rule, look="rule"),
        cost_curve(results, chosen.looks),
        coverage(results, ARGMAX, chosen.looks, chosen.size),
        estimators(results, chosen),
        batched and Details(summary="What batches read", blocks=(batched,)),
        tails(results, at_size, chosen.looks, chosen.size),
        *_folded("Percentiles of -ln m, scheme by scheme", percentiles(results, chosen)),
        probability and Details(summary=probability.alt, blocks=(probability,)),
    )
    return [one for one in blocks if one is not None]


def _by_domain(results: Results, chosen: Named) -> list[Block]:
    told, judged, table = few(results), verdicts(results), by_domain(results, chosen)
    caution = Text(text=told, look="caution") if told else None
    why = None if judged is None else reasons(results)
    return _titled("By domain", [caution, judged, why, table])


def _folded(summary: str, blocks: Sequence[Block]) -> list[Block]:
    """Return the sentence that comes first, and the rest folded up; [] of nothing."""
    return [blocks[0], Details(summary=summary, blocks=tuple(blocks[1:]))] if blocks else []


def _titled(title: str, blocks: Sequence[Block | None]) -> list[Block]:
    """Return blocks under a heading, those that there are, and no heading over nothing."""
    there = [one for one in blocks if one is not None]
    return [Heading(text=title), *there] if there else []
