"""What went wrong and what to try: rules that fired, that did not, that cannot be told or checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Block, Details, Section, Text
from tracekit.report.diagnosis import RULES
from tracekit.report.estimates import cell
from tracekit.report.tables import HtmlTable, text_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.load import Results
    from tracekit.report.options import Options


def section(results: Results, options: Options) -> Section:
    """Return the table of symptoms, and folded what was checked in vain or not at all."""
    found = [(one, one.find(results, options)) for one in RULES]
    fired = [
        (one.symptom, f"{seen.evidence}. Rule: {one.threshold}.", one.cause, one.remedy)
        for one, seen in found
        if seen and seen.fires
    ]
    quiet, unclear = (
        [
            (one.symptom, one.threshold, seen.evidence)
            for one, seen in found
            if seen and (None if seen.fires is None else bool(seen.fires)) is fires
        ]
        for fires in (False, None)
    )
    unchecked = [(one.symptom, one.threshold, one.needs) for one, seen in found if not seen]
    text = (
        f"{len(RULES)} rules were tried: {len(fired)} fired, {len(quiet)} did not, of {len(unclear)} "
        f"the interval does not tell, {len(unchecked)} could not be checked. A rule fires on what was "
        "measured; its cause is likely, not proven."
    )
    blocks: list[Block] = [Text(text=text, look="note")]
    if fired:
        labels = "symptom|evidence in this run|likely cause|what to try"
        blocks.append(_table("diagnosis-found", "Symptoms that were found", labels, fired))
    if quiet:
        labels = "symptom|would fire at|measured"
        table = _table("diagnosis-quiet", "Checked, below the threshold", labels, quiet)
        blocks.append(Details(summary=f"Checked and not found: {len(quiet)}", blocks=(table,)))
    if unclear:
        labels = "symptom|would fire at|measured"
        table = _table(
            "diagnosis-unclear", "Checked, the interval lies across the threshold", labels, unclear
        )
        title = f"Cannot be told from these data: {len(unclear)}"
        blocks.append(Details(summary=title, blocks=(table,)))
    if unchecked:
        labels = "symptom|would fire at|what is missing"
        table = _table("diagnosis-unchecked", "Not checked", labels, unchecked)
        title = f"Could not be checked here: {len(unchecked)}"
        blocks.append(Details(summary=title, blocks=(table,)))
    return Section(name="diagnosis", title="Diagnosis", short="Diagnosis", blocks=tuple(blocks))


def _table(name: str, caption: str, labels: str, rows: Sequence[tuple[str, ...]]) -> HtmlTable:
    return HtmlTable(
        name=name,
        caption=caption,
        columns=tuple(map(text_column, labels.split("|"))),
        rows=tuple(tuple(map(cell, row)) for row in rows),
    )
