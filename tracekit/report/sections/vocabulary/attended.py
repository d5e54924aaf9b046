"""How attention foretells the next token, and how its anchors drift as the context grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tracekit.report.blocks import Text
from tracekit.report.estimates import span
from tracekit.report.formats import count, evidence, number, percent, percent_range
from tracekit.report.tables import INTERVAL, Column, build, text_column
from tracekit.schema import ALL, ANCHOR_KEYS, ANY, ATTENDED_SUMMARY

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.blocks import Block
    from tracekit.report.load import Results

BEST = "top_1_hit_all"
"""By what heads are ranked: it counts every row, so that rare copies do not flatter a head."""

Cells = dict[tuple[Any, Any, str], dict[Any, Any]]
"""Rows by place and measure."""

_TOLD = (BEST, "top_8_hit_all", "top_64_hit_all", "next_mass", "chance_mass")

_DRIFT = ("drift_1", "drift_16", "age_tokens", "prompt_frac")
_DRIFT_COLUMNS = (
    text_column("tokens seen"),
    Column("drift, 1 row", number),
    INTERVAL,
    Column("drift, 16 rows", number),
    INTERVAL,
    Column("age of anchors (tokens)", number),
    Column("anchors in the prompt", percent),
    Column("n", count),
)


def foretelling(results: Results) -> list[Block]:
    """Return what attention says of the next token; [] where it was not measured."""
    rows = results.table(ATTENDED_SUMMARY)
    rows = rows[rows["context_last"].isna() & (rows["domain"] == ANY)]
    cells: Cells = {
        (row["layer"], row["head"], row["measure"]): row
        for row in rows[rows["measure"].isin([*_TOLD, "copied_frac"])].to_dict("records")
    }
    if (ALL, ALL, BEST) not in cells:
        return []
    heads = rows[(rows["measure"] == BEST) & (rows["layer"] != ALL) & (rows["head"] != ALL)]
    heads = heads[heads["mean"].notna()].sort_values(
        ["mean", "layer", "head"], ascending=[False, True, True]
    )
    places = [("all heads, mean", ALL, ALL)]
    places += [
        (f"layer {layer}, head {head}", layer, head)
        for layer, head in heads[["layer", "head"]].head(3).itertuples(index=False, name=None)
    ]
    columns = (
        text_column("heads"),
        Column("most attended token comes next", percent),
        INTERVAL,
        Column("among the 8 most attended", percent),
        Column("among the 64", percent),
        Column("attention on the next token", percent),
        Column("by chance", percent),
        Column("n", count),
    )
    told = [_of_heads(cells, *place) for place in places]
    caption = (
        "Of all rows, those whose next token is the most attended one, or among the 8 or 64 most "
        "attended (positions of a token added up, the first key left out); attention of copied rows "
        "alone. Level local, means over sequences, seed "
        f"{results.run['seed']}. The 3 best heads are chosen among {len(heads)} on these very "
        "sequences: on others they do less well."
    )
    return [
        Text(text=_said(cells, len(heads))),
        build("table-foretelling", caption, columns, told),
    ]


def _of_heads(cells: Cells, name: str, layer: int, head: int) -> list[Any]:
    """Return the row of one head, or of the mean of all."""
    best = cells[layer, head, BEST]
    first, *rest = (cells.get((layer, head, one), {}).get("mean", math.nan) for one in _TOLD)
    return [name, first, percent_range(best["low"], best["high"]), *rest, best["n"]]


def _said(cells: Cells, num_heads: int) -> str:
    """Return whether attention points at the next token, and what bounds that."""
    copied, mass, chance = (
        cells[ALL, ALL, one] for one in ("copied_frac", "next_mass", "chance_mass")
    )
    parts = [
        (
            f"{percent(copied['mean'])} of next tokens already stand in the context "
            f"({evidence(copied['low'], copied['high'], copied['n'])}): no reading of attention "
            "foretells more."
        ),
        (
            f"Over {num_heads} heads attention lies on them with {percent(mass['mean'])}, where chance would "
            f"give {percent(chance['mean'])}."
        ),
    ]
    if mass["low"] > chance["high"]:
        parts.append("The intervals are apart: that attention points ahead is supported.")
    else:
        parts.append("The intervals are not apart: that attention points ahead is not shown.")
    return " ".join(parts)


def drift(results: Results) -> list[Block]:
    """Return how anchors move by context length; [] where it was not measured."""
    rows = results.table(ATTENDED_SUMMARY)
    rows = rows[rows["context_last"].notna() & (rows["domain"] == ANY)]
    rows = rows[(rows["layer"] == ALL) & (rows["head"] == ALL)]
    if rows.empty:
        return []
    keys = ["context_first", "context_last"]
    cells: Cells = {
        (row["context_first"], row["context_last"], row["measure"]): row
        for row in rows.to_dict("records")
    }
    spans = rows[keys].drop_duplicates().sort_values(keys).itertuples(index=False, name=None)
    told = [_of_span(cells, *one) for one in spans]
    caption = (
        f"Drift of a layer's {ANCHOR_KEYS} anchors, the keys that it attends to most: 1 - Jaccard "
        "overlap with those of 1 and of 16 rows before. Level local, mean over layers, then over "
        f"sequences, seed {results.run['seed']}; rows of this table are of other sequences, in part."
    )
    return [Text(text=_moved(rows)), build("table-drift", caption, _DRIFT_COLUMNS, told)]


def _of_span(cells: Cells, first: float, last: float) -> list[Any]:
    """Return the row of one bucket of context length."""
    near, far, age, prompt = (cells[first, last, one] for one in _DRIFT)
    return [
        f"{count(first)} to {count(last)}",
        *(near["mean"], span(near["low"], near["high"], number)),
        *(far["mean"], span(far["low"], far["high"], number)),
        *(age["mean"], prompt["mean"], near["n"]),
    ]


def _moved(rows: pd.DataFrame) -> str:
    """Return whether anchors drift more in the longest context than in the shortest."""
    found = []
    for measure, name in (("drift_1", "1 row"), ("drift_16", "16 rows")):
        known = rows[(rows["measure"] == measure) & rows["low"].notna()]
        known = known.sort_values("context_first")
        if len(known) < 2:
            continue
        first, last = known.iloc[0], known.iloc[-1]
        word = "does not change beyond its interval"
        if last["low"] > first["high"]:
            word = "rises"
        elif last["high"] < first["low"]:
            word = "falls"
        found.append(
            f"over {name} it {word} ({number(first['mean'])} at {count(first['context_first'])} to "
            f"{count(first['context_last'])} tokens, {number(last['mean'])} at "
            f"{count(last['context_first'])} to {count(last['context_last'])})"
        )
    told = "; ".join(found) or "too few sequences at two lengths to say"
    return f"That anchors drift more as the context grows: {told}."
