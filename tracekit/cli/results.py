"""``tracekit show RESULTS``: the tables of a results folder, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit.cli.calibration import calibration_table, trust
from tracekit.cli.output import range_text
from tracekit.cli.results_folder import read_rows
from tracekit.cli.verdicts import read_verdicts
from tracekit.schema import (
    ANY,
    CALIBRATION,
    LAYER_SUMMARY,
    RECOMMENDED,
    STACKING,
    SUMMARY,
)
from tracekit.simulate.folder import read_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PREDICTED = ("kl_predicted_nats", "kl_corrected_nats")
_PROPAGATED = ("kl_nats", "nll_pruned", "same_top_frac")
_KINDS = (
    ("kv", "local", "kept_frac", ("output_error", "mass_kept", "oracle_overlap")),
    ("kv", "local", "read_frac", ("output_error", "mass_kept", "topk_overlap", "hit_frac")),
    ("kv", "predicted", "kept_frac", _PREDICTED),
    ("kv", "predicted", "read_frac", _PREDICTED),
    ("kv", "propagated", "kept_frac", _PROPAGATED),
    ("kv", "propagated", "read_frac", _PROPAGATED),
)
"""Question, level, axis, and the measures that are shown of them beside a fraction's own."""

_STACKED = {
    "local": ("output_error_sq", "error_bound", "an output error of"),
    "predicted": ("kl_predicted_nats", "error_bound", "an output error of"),
    "propagated": ("kl_nats", "perplexity_bound", "a change of perplexity of"),
}
"""By level: the measure of stacking that adds up if independent, and the bound of its rule."""

_PLAIN = (
    *("kept_frac", "read_frac", "hit_frac"),
    *("topk_overlap", "oracle_overlap", "same_top_frac"),
)
"""Measures that are shown without their interval."""


def read_results(folder: Path, size: int | None = None) -> tuple[dict[str, Any], str]:
    """Return a results folder as data, and as text.

    Parameters
    ----------
    folder
        Of results.
    size
        The size at which candidate sets are compared; None: the middle one of those asked.

    Raises
    ------
    InputError
        If it is damaged or of another version, or no set of that size was tried.
    """
    run = read_run(folder)
    summary = read_rows(folder, SUMMARY)
    rows = [row for row in summary if row["domain"] == ANY and row["bucket"] == ANY]
    verdicts, told = read_verdicts(folder, size)
    calibration, stacking = read_rows(folder, CALIBRATION), read_rows(folder, STACKING)
    recommended = read_rows(folder, RECOMMENDED)
    parts = [f"{folder}: {len(run['sequences'])} sequences of {run['trace']['path']}"]
    parts += [f"failed {one['cell']}: {one['why']}" for one in run["failed"]]
    parts += [text for kind in _KINDS if (text := _summary(rows, *kind))]
    parts += [told] if told else []
    parts += [calibration_table(calibration), trust(calibration)] if calibration else []
    parts += [text for level in _STACKED if (text := _stacking(stacking, level))]
    parts += [_recommended(recommended)] if recommended else []
    layers = read_rows(folder, LAYER_SUMMARY)
    parts += [_swept(layers, run.get("fitted"))] if layers else []
    data = {
        "results": str(folder),
        "run": run,
        "summary": rows,
        "calibration": calibration,
        "stacking": stacking,
        "recommended": recommended,
        "layers": layers,
        "verdicts": verdicts,
    }
    return data, "\n\n".join(parts)


def _swept(rows: list[dict[str, Any]], fitted: str | None) -> str:
    """Return the map of layers and rules."""
    from tracekit.cli.layers import layers_text

    return layers_text({name: [row[name] for row in rows] for name in rows[0]}, fitted)


def _summary(
    rows: list[dict[str, Any]], question: str, level: str, axis: str, measures: Sequence[str]
) -> str | None:
    """Return the table of one question at one level on one axis; None if there is nothing."""
    from tracekit.cli.output import table

    found: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if (row["question"], row["level"], row["x_name"]) == (question, level, axis):
            found.setdefault((row["family"], row["x"]), {})[row["measure"]] = row
    if not found:
        return None
    shown = [axis, *measures]
    used = [one for one in shown if any(_has(cell.get(one)) for cell in found.values())]
    cells = [
        [
            _name(name, next(iter(cell.values()))),
            *(_interval(cell.get(one)) for one in used),
            str(max(row["n"] for row in cell.values())),
        ]
        for (name, _), cell in sorted(found.items())
    ]
    return table(f"{question}, level {level}", ["name", *used, "n"], cells)


def _name(name: str, row: dict[str, Any]) -> str:
    """Return the name, bounds named so."""
    return f"{name} (bound)" if row["causal"] is False else name


def _stacking(rows: list[dict[str, Any]], level: str) -> str | None:
    """Return what eviction and transform cost alone and together; None if nothing was stacked."""
    from tracekit.cli.output import number, table

    measure, bound, name = _STACKED[level]
    rows = [row for row in rows if row["level"] == level and row["measure"] == measure]
    if not rows:
        return None
    cells = [
        [
            _short(row["policy"]),
            number(row["kept_frac"]),
            *(number(row[f"{one}_mean"]) for one in ("eviction", "transform", "together")),
            range_text(row["interaction"], row["low"], row["high"]),
            {True: "do not stack", False: "may be stacked", None: "-"}[row[f"exceeds_{bound}"]],
            str(row["n"]),
        ]
        for row in rows
    ]
    columns = ["stacked", "kept_frac", "evicted", "transformed", "together", "interaction", "rule"]
    title = (
        f"stacking, {measure}, level {level}; rule: the transform alone stays below {name} "
        f"{rows[0][bound]:g}"
    )
    return table(title, [*columns, "n"], cells)


def _short(text: str) -> str:
    """Return a policy's text with its amount alone."""
    from tracekit.kv.parse import parse

    policy = parse(text)
    amount = text.partition("kept=")[2].partition(",")[0]
    return f"{policy.family} at {amount}"


def _recommended(rows: list[dict[str, Any]]) -> str:
    """Return the kept fraction that attention suggests for each layer, and why."""
    from tracekit.cli.output import number, table

    evidence = ("mean_frac", "oracle_frac", "keys_95_frac", "first_4_mass")
    cells = [
        [
            str(row["layer"]),
            range_text(row["kept_frac"], row["low"], row["high"]),
            *(number(row[one]) for one in evidence),
            str(row["n"]),
        ]
        for row in rows
    ]
    first = rows[0]
    title = (
        f"kept fraction by layer for {first['mass_frac']:.0%} of later attention in "
        f"{first['quantile']:.0%} of rows and sequences, level {first['level']}"
    )
    return table(title, ["layer", "kept_frac", *evidence, "n"], cells)


def _has(row: dict[str, Any] | None) -> bool:
    return row is not None and row["mean"] is not None


def _interval(row: dict[str, Any] | None) -> str:
    """Return a mean with its 95 % interval, if there is one."""
    from tracekit.cli.output import number

    if row is None:
        return "-"
    if row["measure"] in _PLAIN:
        return number(row["mean"])
    return range_text(row["mean"], row["low"], row["high"])
