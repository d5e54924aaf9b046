"""The tables of a report: plain rows of text, each cell with the number that it sorts by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit.report.formats import NOTHING, count, number, percent, percent_range, size
from tracekit.schema import ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tracekit.report.load import Point, Results

WANTED_FRACS = (0.10, 0.25, 0.50)
"""Kept fractions asked for at which policies are compared."""

WANTED_SIZE = 1024
"""Candidates at which estimators are compared by domain."""


@dataclass(frozen=True)
class Column:
    """One column: its label, how a value is written, and whether it is a number."""

    label: str
    write: Callable[[Any], str] = str
    is_number: bool = True


@dataclass(frozen=True)
class Cell:
    """One cell: its text and what it sorts by ('' for the text itself, or for null)."""

    text: str
    key: str
    is_number: bool


@dataclass(frozen=True)
class HtmlTable:
    """A table for the page; the first cell of a row is its heading."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def build(caption: str, columns: Iterable[Column], rows: Iterable[Iterable[Any]]) -> HtmlTable:
    """Return a table from rows of raw values, one value a column; null is written 'n/a'."""
    columns = tuple(columns)
    cells = (tuple(map(_cell, columns, row)) for row in rows)
    return HtmlTable(caption, columns, tuple(cells))


def _cell(column: Column, value: Any) -> Cell:
    if pd.isna(value):
        return Cell(NOTHING, "", column.is_number)
    key = f"{float(value):.9g}" if column.is_number else ""
    return Cell(column.write(value), key, column.is_number)


def _text(label: str) -> Column:
    return Column(label, str, is_number=False)


_INTERVAL = _text("95\u00a0% interval")


def of_frame(caption: str, frame: pd.DataFrame) -> HtmlTable:
    """Return the table of a figure's numbers, columns named as in its CSV file."""
    columns = [
        Column(
            str(name),
            number if pd.api.types.is_float_dtype(kind) else str,
            is_number=pd.api.types.is_numeric_dtype(kind),
        )
        for name, kind in frame.dtypes.items()
    ]
    return build(caption, columns, frame.itertuples(index=False, name=None))


def recorded(results: Results) -> HtmlTable:
    """Return what was recorded, by domain."""
    frame = pd.DataFrame(results.run["sequences"])
    rows = frame.groupby("domain", as_index=False).agg(
        n=("sequence_id", "size"),
        tokens=("num_tokens", "sum"),
        scored=("num_scored", "sum"),
        entropy=("mean_entropy_nats", "mean"),
        sources=("text_source", lambda values: ", ".join(sorted(set(values)))),
    )
    columns = (
        _text("domain"),
        Column("sequences", count),
        Column("tokens", count),
        Column("scored", count),
        Column("mean entropy (nats)", number),
        _text("text"),
    )
    return build("Recorded sequences by domain", columns, rows.itertuples(index=False, name=None))


def sequences(results: Results) -> HtmlTable:
    """Return the recorded sequences, one by one."""
    columns = {
        "sequence_id": _text("sequence"),
        "domain": _text("domain"),
        "num_tokens": Column("tokens", count),
        "context_end": Column("context ends", count),
        "prompt_end": Column("prompt ends", count),
        "finish_reason": _text("finished by"),
        "text_source": _text("text"),
        "mean_entropy_nats": Column("mean entropy (nats)", number),
    }
    rows = [[row[name] for name in columns] for row in results.run["sequences"]]
    return build("Recorded sequences", columns.values(), rows)


def policies(results: Results) -> HtmlTable:
    """Return every policy at the kept fractions asked for that are nearest the wanted ones."""
    curves = results.curves("kv", "output_error")
    nearest = {_nearest(curve, wanted) for curve in curves.values() for wanted in WANTED_FRACS}
    mass, held = results.means("kv", "mass_kept"), results.means("kv", "kv_bytes")
    schedules = dict(zip(results.kv["policy"], results.kv["evict_at"], strict=True))
    whole = results.kv[(results.kv["layer"] == ALL) & (results.kv["kv_head"] == ALL)]
    clipped = whole.groupby("policy")["is_clipped"].sum().to_dict()
    columns = (
        _text("policy"),
        Column("asked to keep", percent),
        Column("kept, measured", percent),
        Column(f"output error, level {results.level}", percent),
        _INTERVAL,
        Column("n", count),
        Column("left out", count),
        Column("clipped", count),
        Column("mass kept", percent),
        Column("cache, mean bytes", size),
        Column("schedule", lambda text: str(text).replace(",", ", "), is_number=False),
    )
    rows = [
        [
            *(point.family, point.asked, point.x),
            *(point.mean, percent_range(point.low, point.high), point.n),
            *(point.num_excluded, clipped.get(point.name)),
            *(mass.get(point.cell), held.get(point.cell), schedules.get(point.name)),
        ]
        for point in sorted(nearest, key=lambda point: (point.asked, point.mean, point.family))
    ]
    wanted = ", ".join(map(percent, WANTED_FRACS))
    caption = (
        f"Policies where the fraction asked for is nearest {wanted}; least error first. Left out: "
        "sequences where nothing was evicted. Clipped: sequences whose budget was smaller than what "
        "the policy protects, so that its scores had no say."
    )
    return build(caption, columns, rows)


def kv_domains(results: Results) -> HtmlTable:
    """Return mean output error by domain and policy, where about half was asked for."""
    wanted = WANTED_FRACS[-1]
    caption = (
        f"Output error by domain, level {results.level}, where the fraction asked for is nearest "
        f"{percent(wanted)}"
    )
    return _by_domain(results, "kv", "output_error", wanted, caption)


def vocab_domains(results: Results) -> HtmlTable:
    """Return the share of steps with the top token covered, by domain and estimator."""
    caption = f"Top token covered by domain, where the size is nearest {count(WANTED_SIZE)}"
    return _by_domain(results, "vocab", "hit_argmax", WANTED_SIZE, caption)


def _nearest(curve: list[Point], wanted: float) -> Point:
    return min(curve, key=lambda point: abs(point.asked - wanted))


def _like(point: Point, curve: list[Point]) -> Point | None:
    """Return the point of a curve that is the same policy or estimator at the same size."""
    same = [other for other in curve if other.name == point.name]
    return _nearest(same, point.asked) if same else None


def _by_domain(
    results: Results, question: str, measure: str, wanted: float, caption: str
) -> HtmlTable:
    """Return one measure: a row a domain, a column a family at its size nearest the wanted one."""
    whole = results.curves(question, measure)
    chosen = {family: _nearest(curve, wanted) for family, curve in whole.items()}
    rows = []
    for domain in results.domains(question):
        curves = results.curves(question, measure, domain=domain)
        points = [_like(point, curves.get(family, [])) for family, point in chosen.items()]
        n = max((point.n for point in points if point), default=0)
        rows.append([domain, n, *(point.mean if point else math.nan for point in points)])
    columns = [_text("domain"), Column("n", count), *(Column(name, percent) for name in chosen)]
    return build(caption, columns, rows)


def estimators(results: Results) -> HtmlTable:
    """Return every estimator at a small, a middle and the largest size, with what it costs."""
    others = {
        "set_size_mean": Column("scored, mean", count),
        "hit_chosen": Column("recorded token covered", percent),
        "mass": Column("probability covered", percent),
        "neg_log_mass_nats": Column("-ln covered (nats)", number),
        "nll_backoff": Column("surprisal, back-off (nats)", number),
        "cost_frac": Column("bytes read, of full head", percent),
    }
    columns = (
        _text("estimator"),
        Column("candidates", count),
        Column("top token covered", percent),
        _INTERVAL,
        Column("n", count),
        *others.values(),
    )
    means = [results.means("vocab", measure) for measure in others]
    rows = [
        [
            *(point.family, point.x, point.mean, percent_range(point.low, point.high), point.n),
            *(mean.get(point.cell) for mean in means),
        ]
        for curve in results.curves("vocab", "hit_argmax").values()
        for point in dict.fromkeys((curve[0], _nearest(curve, WANTED_SIZE), curve[-1]))
    ]
    return build("Estimators by size", columns, rows)


def skipped(results: Results) -> HtmlTable:
    """Return the cells that do not apply, with the reason; sequences of one reason together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in results.run["skipped"]:
        groups.setdefault((row["what"], row["why"]), []).append(row["sequence_id"] or NOTHING)
    columns = (_text("what"), _text("why"), Column("cells", count), _text("sequences"))
    rows = [[*key, len(names), ", ".join(names)] for key, names in groups.items()]
    return build("Skipped: does not apply", columns, rows)


def failed(results: Results) -> HtmlTable:
    """Return the cells that failed, with the reason."""
    rows = [[row["cell"], row["why"]] for row in results.run["failed"]]
    return build("Failed", (_text("cell"), _text("why")), rows)
