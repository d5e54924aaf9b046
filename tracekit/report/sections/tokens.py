"""The text itself: where the model is unsure, what policies leave, what candidate sets miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Absent, Block, Details, Heading, Section, Text
from tracekit.report.formats import count, number, percent
from tracekit.report.readable import label
from tracekit.report.sections.tokens_shown import MOST_TOKENS, shown_sequences
from tracekit.report.strips import kept_strips
from tracekit.report.tables import Column, HtmlTable, build, text_column
from tracekit.report.tokens import TokenText, Views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.load import Results
    from tracekit.report.options import Options
    from tracekit.report.sections.tokens_shown import ShownSequence

MOST_UNSURE = 20
_TOLD_CANDIDATES = 3
_NAMES = [
    "position",
    "text",
    "entropy_nats",
    "surprisal_nats",
    "rank",
    "top_texts",
    "top_probs",
]
_SIMULATE = "tracekit simulate TRACE -o RESULTS"


def section(results: Results, options: Options) -> Section | Absent:
    """Return the shown sequences, token by token."""
    del options
    shown = shown_sequences(results)
    if not shown:
        return Absent(what="No sequences to show", command=_SIMULATE)
    views = Views(policies=_policies(shown), schemes=_schemes(shown))
    first, *others = (
        (one, _sequence(place, one, views)) for place, one in enumerate(shown, start=1)
    )
    return Section(
        name="tokens",
        title="The text, token by token",
        short="Tokens",
        blocks=(
            Text(text=_introduction(results, shown)),
            *_lacking(views),
            views,
            Heading(text=first[0].sequence_id),
            *first[1],
            *(
                Details(summary=f"{one.sequence_id}: {count(one.num_tokens)} tokens", blocks=blocks)
                for one, blocks in others
            ),
        ),
    )


def _policies(shown: Sequence[ShownSequence]) -> tuple[str, ...]:
    """Return the policies that some sequence has, in their order."""
    return tuple(dict.fromkeys(one.policy.family for part in shown for one in part.left))


def _schemes(shown: Sequence[ShownSequence]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.scheme.family for part in shown for one in part.missed))


def _introduction(results: Results, shown: Sequence[ShownSequence]) -> str:
    """Return what is shown, of how much, and what is cut."""
    every = len(results.run["sequences"])
    cut = [one.sequence_id for one in shown if len(one.rows) < one.num_tokens]
    left_out = f" Cut after {count(MOST_TOKENS)} tokens: {', '.join(cut)}." if cut else ""
    return (
        f"{len(shown)} of {count(every)} recorded sequences, the first of each kind of text. Each "
        "token is set on a ground of its own, stronger and with a thicker line below the less sure "
        "the model was of it. Point at a token, or go to the text with the tab key and through it "
        "with the arrow keys, to read its numbers. They are those of single tokens: nothing is to be "
        f"concluded from one.{left_out}"
    )


def _lacking(views: Views) -> list[Block]:
    """Return what the text cannot be coloured by, and how to get it."""
    missing: list[Block] = []
    if not views.policies:
        what, command = "What policies leave of the text is not known", "--kv snapkv --kv streaming"
        missing.append(Absent(what=what, command=f"{_SIMULATE} {command}"))
    if not views.schemes:
        what, command = "Which tokens would be pruned is not known", "--vocab lowrank --vocab ngram"
        missing.append(Absent(what=what, command=f"{_SIMULATE} {command}"))
    return missing


def _sequence(place: int, one: ShownSequence, views: Views) -> tuple[Block, ...]:
    """Return text, strips and the least sure steps of one sequence."""
    strips = [kept_strips(f"kept-entries-{place}", one)] if one.left else []
    text = TokenText(sequence=one, policies=views.policies, schemes=views.schemes)
    unsure = _unsure(place, one)
    title = f"The {len(unsure.rows)} least sure steps"
    return text, *strips, Details(summary=title, blocks=(unsure,))


def _unsure(place: int, one: ShownSequence) -> HtmlTable:
    """Return the steps of the highest entropy."""
    columns = (
        Column("position", count),
        text_column("token"),
        Column("entropy (nats)", number),
        Column("surprisal (nats)", number),
        Column("likelier tokens", count),
        text_column("most likely"),
    )
    rows = one.rows.dropna(subset=["entropy_nats"])
    rows = rows.sort_values(["entropy_nats", "position"], ascending=[False, True])
    told = [
        [position, label(token), *numbers, _likely(texts, probs)]
        for position, token, *numbers, texts, probs in rows[_NAMES]
        .head(MOST_UNSURE)
        .itertuples(index=False, name=None)
    ]
    caption = f"Steps of {one.sequence_id} with the highest entropy"
    return build(f"table-unsure-{place}", caption, columns, told)


def _likely(texts: Sequence[str] | None, probs: Sequence[float] | None) -> str:
    """Return the most likely tokens with their probabilities; nothing where they are not known."""
    if texts is None or probs is None:
        return ""
    pairs = list(zip(texts, probs, strict=True))[:_TOLD_CANDIDATES]
    return ", ".join(f"{label(text)} {percent(prob)}" for text, prob in pairs)
