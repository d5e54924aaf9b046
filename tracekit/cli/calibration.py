"""How far predictions can be trusted, as text."""

from __future__ import annotations

import textwrap
from typing import Any

from tracekit.cli.output import WIDTH, number, range_text, table
from tracekit.schema import ENOUGH_CELLS

_COUNTS = ("cells", "pairs")
"""Statistics of a calibration that only count."""


def calibration_table(rows: list[dict[str, Any]]) -> str:
    """Return how far estimates agree with what was propagated, and what was left out."""
    cells = [
        [
            row["statistic"],
            row["level"],
            row["group"],
            range_text(row["value"], row["low"], row["high"]),
            str(row["num_cells"]),
            str(row["num_sequences"]),
        ]
        for row in rows
        if row["statistic"] not in _COUNTS
    ]
    count = {
        (row["level"], row["group"]): int(row["value"])
        for row in rows
        if row["statistic"] in _COUNTS
    }
    pairs = " and ".join(
        f"{count[level, 'tied'] + count[level, 'near noise']} ({level})"
        for level in ("predicted", "local")
    )
    title = (
        f"calibration against level propagated on {count[None, 'all']} cells (policy, sequence); "
        f"left out: {count[None, 'bound']} of bounds, {count[None, 'idle']} that change nothing; of "
        f"logarithms: {count[None, 'no logarithm']} at the noise floor or foretold as 0; of pairs, "
        f"tied or nearer than the noise: {pairs}"
    )
    columns = ["statistic", "level", "group", "value", "cells", "sequences"]
    return table(title, columns, cells)


def trust(rows: list[dict[str, Any]]) -> str:
    """Return in a sentence how far predictions can be trusted."""
    of = {(row["statistic"], row["group"]): row for row in rows if row["level"] == "predicted"}
    whole = of["spearman", "all"]
    if whole["num_cells"] < ENOUGH_CELLS:
        return textwrap.fill(
            f"predicted is an estimate: {whole['num_cells']} cells at all three levels are too few to "
            f"say how good; run at least {ENOUGH_CELLS}.",
            WIDTH,
        )
    rho = range_text(whole["value"], whole["low"], whole["high"])
    text = (
        f"predicted is an estimate: on {whole['num_sequences']} sequences ({whole['num_cells']} "
        f"cells) its Spearman correlation with propagated KL is {rho}"
    )
    for (statistic, group), row in of.items():
        if statistic == "spearman_lowest":
            text += f" (lowest within a sequence: {number(row['value'])}, {group})"
    (local,) = (row for row in rows if (row["statistic"], row["level"]) == ("spearman", "local"))
    text += f"; that of layer-local error is {number(local['value'])}"
    times = [row for row in rows if row["statistic"] == "propagated_over_predicted"]
    if times[0]["value"] is not None:
        # Buckets ascend: the last one is where predictions are largest.
        text += "".join(f"; {_off(row)}" for row in (times[0], times[-1]))
    after = of["left_out_factor", "corrected"]
    if after["value"] is not None:
        before = of["left_out_factor", "as predicted"]
        text += (
            f". On sequences left out of the fit it is off by a factor of {number(before['value'])} "
            f"in the median, by {number(after['value'])} after the power law"
        )
    return textwrap.fill(text + ".", WIDTH)


def _off(row: dict[str, Any]) -> str:
    """Return by how much a bucket of predictions runs low or high."""
    value = row["value"]
    way, factor = ("low", value) if value >= 1 else ("high", 1 / value)
    where = "in the median" if row["group"] == "all" else f"where it is {row['group']} nats a token"
    return f"it runs {way} by a factor of {number(factor)} {where}"
