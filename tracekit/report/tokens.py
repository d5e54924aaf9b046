"""The text of shown sequences, token by token: readable, and classed by entropy."""

from __future__ import annotations

import bisect
import itertools
import math
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.report.formats import number, percent, visible

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Results

EDGES_NATS = (0.05, 0.25, 0.7, 1.5, 3.0)
"""Edges between the entropy classes: nearly certain tokens first."""

_SHOWN_CANDIDATES = 5


@dataclass(frozen=True)
class ShownToken:
    """One token: what is read, its classes in the style sheet, and what is known of its step."""

    text: str
    classes: str
    facts: str


@dataclass(frozen=True, kw_only=True)
class ShownSequence:
    """One sequence: its tokens and a line about it."""

    sequence_id: str
    summary: str
    tokens: tuple[ShownToken, ...]


def shown_sequences(results: Results) -> tuple[ShownSequence, ...]:
    """Return the sequences of ``shown.parquet`` in the order of the run."""
    domains = {row["sequence_id"]: row["domain"] for row in results.run["sequences"]}
    return tuple(
        _sequence(str(sequence_id), domains.get(sequence_id), rows.sort_values("position"))
        for sequence_id, rows in results.shown.groupby("sequence_id", sort=False)
    )


def legend() -> tuple[tuple[str, str], ...]:
    """Return class and label of each entropy class, low to high."""
    edges = [f"{edge:g}" for edge in EDGES_NATS]
    labels = [f"below {edges[0]}"]
    labels += [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
    labels.append(f"{edges[-1]} and more")
    return tuple((f"e{number}", label) for number, label in enumerate(labels))


def readable(text: str) -> str:
    r"""Return a token's text so that every character is seen: ``\n`` gets a mark and stays.

    Line feeds, tabs and lone spaces get a sign; control, format and bidi characters and unusual
    spaces are written out. The result is not yet escaped for HTML.
    """
    if not text:
        return "\u2205"
    if text.isspace() and not text.strip(" "):
        return "\u2423" * len(text)
    marked = visible(text).replace("\n", "\u21b5\n").replace("\t", "\u21e5\t")
    shown = "".join(
        f"<U+{ord(char):04X}>" if char != " " and unicodedata.category(char) == "Zs" else char
        for char in marked
    )
    # Traces hold line feeds written out: the line still ends there.
    return shown + "\n" if text.endswith(r"\n") else shown


def _sequence(sequence_id: str, domain: str | None, rows: pd.DataFrame) -> ShownSequence:
    generated = int(rows["is_generated"].sum())
    mean = rows["entropy_nats"].mean()
    where = f"{domain}, " if domain else ""
    return ShownSequence(
        sequence_id=sequence_id,
        summary=(
            f"{where}{len(rows)} tokens, {generated} generated, mean entropy {number(mean)} nats"
        ),
        tokens=tuple(_token(row) for row in rows.itertuples(index=False)),
    )


def _token(row: Any) -> ShownToken:
    made = "" if row.is_generated else " p"
    if math.isnan(row.entropy_nats):
        return ShownToken(readable(row.text), f"t{made}", f"position {row.position}: not predicted")
    entropy_class = bisect.bisect_right(EDGES_NATS, row.entropy_nats)
    facts = (
        f"position {row.position}: entropy {row.entropy_nats:.2f} nats, "
        f"surprisal {row.surprisal_nats:.2f} nats, rank {row.rank:.0f}"
    )
    return ShownToken(readable(row.text), f"t e{entropy_class}{made}", facts + _candidates(row))


def _candidates(row: Any) -> str:
    """Return the most likely tokens with their probabilities; nothing where they are not known."""
    if row.top_texts is None or row.top_probs is None:
        return ""
    pairs = list(zip(row.top_texts, row.top_probs, strict=True))[:_SHOWN_CANDIDATES]
    shown = (f"{readable(text).strip() or text} {percent(prob)}" for text, prob in pairs)
    return "; likely: " + " | ".join(shown)
