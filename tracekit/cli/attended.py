"""``tracekit show RESULTS --attended``: what attention says of the next token, and how it drifts."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from tracekit.cli.results_folder import read_rows
from tracekit.schema import ALL, ANCHOR_KEYS, ATTENDED_SUMMARY
from tracekit.simulate.folder import read_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HEADS = 10
"""Query heads that are listed, the best first."""

BEST = "top_1_hit_all"
"""By what they are ordered: it counts every row, so that rare copies do not flatter a head."""

_OF_HEADS = (BEST, "top_8_hit_all", "next_mass", "rank_median", "induction_mass")
_OF_LAYERS = (BEST, "reciprocal_rank", "next_mass", "chance_mass", "induction_mass")
_OF_DOMAINS = ("copied_frac", "distinct_tokens", "repeated_frac", "induction_hit")
_OF_DRIFT = ("drift_1", "drift_16", "age_tokens", "prompt_frac")

_LABELS = {
    BEST: "top 1",
    "top_8_hit_all": "top 8",
    "next_mass": "mass on next",
    "chance_mass": "by chance",
    "rank_median": "rank",
    "reciprocal_rank": "1 / rank",
    "induction_mass": "on repeats",
    "copied_frac": "copied",
    "distinct_tokens": "distinct",
    "repeated_frac": "repeats",
    "induction_hit": "repeat hits",
    "drift_1": "drift, 1 row",
    "drift_16": "drift, 16 rows",
    "age_tokens": "age, tokens",
    "prompt_frac": "in prompt",
}
"""Heads of columns, so short that a table fits the terminal; ``_note`` explains them."""

_WITH_INTERVAL = (BEST, "next_mass", "copied_frac", "induction_hit", "drift_1", "drift_16")

Rows = list[dict[str, Any]]

Place = tuple[tuple[Any, ...], dict[str, dict[str, Any]]]
"""Names of a place, and its rows by measure."""


def read_attended(folder: Path) -> tuple[dict[str, Any], str]:
    """Return what a results folder knows of attention and the next token, as data and as text.

    Parameters
    ----------
    folder
        Results with attention statistics of a trace with queries and keys.

    Raises
    ------
    InputError
        If it holds none, is damaged, or is of another version.
    """
    from tracekit.errors import InputError

    read_run(folder)
    rows = read_rows(folder, ATTENDED_SUMMARY)
    if not rows:
        msg = (
            f"{folder} does not say what attention foretells: simulate with --attention a trace "
            "that was recorded with --capture qkv."
        )
        raise InputError(msg)
    return {"results": str(folder), "attended": rows}, attended_text(rows)


def attended_text(rows: Rows) -> str:
    """Return the best heads, the layers, the domains, and the drift by context length.

    Parameters
    ----------
    rows
        Of ``schema.ATTENDED_SUMMARY``.
    """
    whole = [row for row in rows if row["layer"] == ALL]
    ranked = sorted(_places(_of(rows, is_layer=False), "layer", "head"), key=_worth)
    layers = _places(_of(rows, is_layer=True), "layer")
    domains = _places([row for row in whole if row["context_last"] is None], "domain")
    drift = _places(
        [row for row in whole if row["context_last"] is not None], "context_first", "context_last"
    )
    sections = (
        (
            "heads whose most attended token is most often the next, level local",
            ("layer", "head"),
            ranked[:HEADS],
            _OF_HEADS,
        ),
        ("layers, mean over their heads, level local", ("layer",), layers, _OF_LAYERS),
        (
            "what could be copied by domain, mean over layers and heads, level local",
            ("domain",),
            domains,
            _OF_DOMAINS,
        ),
        (
            f"drift of a layer's {ANCHOR_KEYS} anchors by tokens seen, mean over layers, level local",
            ("from", "to"),
            drift,
            _OF_DRIFT,
        ),
    )
    # Short sequences have no drift.
    tables = [_table(*section) for section in sections if section[2]]
    return "\n\n".join([_note(len(ranked)), *tables])


def _note(num_heads: int) -> str:
    """Return how the numbers are to be read."""
    from tracekit.cli.output import WIDTH

    text = (
        "Attention on all positions of a token is summed, the sequence's first key left out and the "
        "rest scaled to 1. copied: rows whose next token is in this context. top K: rows whose next "
        "token is among the K most attended tokens, of all rows, so never more than copied. mass on "
        "next, rank (median) and 1 / rank are of copied rows alone; by chance is the mass if all "
        "positions got alike. repeats: rows with positions that follow an earlier copy of the row's "
        "token; on repeats is the attention on those positions, repeat hits how often the next token "
        "stands at one, both of rows with repeats. drift: 1 - Jaccard overlap with the anchors of 1 "
        "and of 16 rows before; other context lengths are of other sequences, in part. The best "
        f"heads are chosen among {num_heads} on these very sequences: on others they do less well."
    )
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _of(rows: Rows, *, is_layer: bool) -> Rows:
    """Return the rows of single layers over all contexts: of their mean heads, or of their heads."""
    return [
        row
        for row in rows
        if row["layer"] != ALL and row["context_last"] is None and (row["head"] == ALL) == is_layer
    ]


def _places(rows: Rows, *by: str) -> list[Place]:
    """Return the names of each place and its measures, in order."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), {})[row["measure"]] = row
    return list(found.items())


def _worth(place: Place) -> tuple[float, tuple[Any, ...]]:
    """Return what sorts the best head first; among equals the one nearest the input."""
    names, measures = place
    mean = measures[BEST]["mean"]
    return (0.0 if mean is None else -mean, names)


def _table(title: str, by: Sequence[str], places: Sequence[Place], measures: Sequence[str]) -> str:
    """Return measures of places with n, the sequences of the first measure."""
    from tracekit.cli.output import table

    cells = [
        [*map(str, names), *(_cell(found[one]) for one in measures), str(found[measures[0]]["n"])]
        for names, found in places
    ]
    return table(title, [*by, *(_LABELS[one] for one in measures), "n"], cells)


def _cell(row: dict[str, Any]) -> str:
    from tracekit.cli.output import number, range_text

    if row["measure"] in _WITH_INTERVAL:
        return range_text(row["mean"], row["low"], row["high"])
    return number(row["mean"])
