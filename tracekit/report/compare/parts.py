"""A comparison as titles, sentences and tables, from which text and Markdown are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.report.compare.ledger import brief
from tracekit.report.compare.measures import LAYERS, MEASURES, RECORDED
from tracekit.report.compare.names import interval, listed, number
from tracekit.report.compare.pairs import RESAMPLES
from tracekit.report.compare.side import NO_PLACE
from tracekit.report.verdict.yardstick import DOMAIN_PROMPTS
from tracekit.schema import ANY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracekit.report.compare.comparison import Comparison
    from tracekit.report.compare.gate import Outcome
    from tracekit.report.compare.names import ShortNames
    from tracekit.report.compare.pairs import Difference

MOST_ROWS = 40
"""Rows of one table; the rest is counted."""

_NEAR = 0.005
"""Kept fractions that differ by no more are read as one."""


@dataclass(frozen=True)
class Part:
    """A title, sentences, and a table (without columns: none)."""

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def parts(made: Comparison) -> Iterator[Part]:
    """Yield what a comparison has to say, what matters most first."""
    short = made.short
    if made.gate:
        yield _gate(made.gate, short)
    yield Part(
        f"B {made.folder_b} against A {made.folder_a}",
        (made.changed, *_meaning(made), *_pairing(made)),
    )
    yield from _tables(made, short)
    yield from _lone(made, short)
    yield Part(
        "ledger",
        (),
        ("of", "what", "A", "B", "status"),
        tuple((e.group, e.what, brief(e.a), brief(e.b), e.status) for e in made.entries),
    )


def _meaning(made: Comparison) -> Iterator[str]:
    """Yield what the changes mean for the comparison."""
    changed = {(one.group, one.what) for one in made.entries if one.status == "changed"}
    match = made.match
    if any("tokenizers differ" in why for why in made.left_out.values()):
        yield (
            "The tokenizers differ, so what is a mean over tokens does not compare and is left out; "
            "shares of bytes and bytes do."
        )
    elif match.other_text:
        yield (
            f"{len(match.other_text)} of {len(match.paired)} sequences hold another text on each "
            "side, each model's own: what pruning costs (errors, KL, hits, kept and cost shares) "
            "compares as a mean over the text that each wrote; bytes and entropies move with the "
            "text too; perplexity does not compare."
        )
    kept = [row for row in made.rows if row.measure.name == "kept_frac" and row.interval.mean]
    if any(abs(row.interval.mean or 0) > _NEAR for row in kept):
        yield (
            "What is kept differs between the sides (column kept: A > B): read a difference beside "
            "it."
        )
    if ("replay", "kv_bytes") in changed or ("replay", "convention") in changed:
        yield "Conventions of the replay changed: bytes and divergences are counted otherwise."
    if ("replay", "probe_block") in changed:
        yield "Probe blocks changed: predicted KL is another estimate."


def _pairing(made: Comparison) -> Iterator[str]:
    match = made.match
    yield (
        f"{len(match.paired)} sequences are pairs; only in A {_counted(match.only_a)}; only in B "
        f"{_counted(match.only_b)}; of another prompt or given text {_counted(match.mismatched)}."
    )
    failed = {
        one: f"{n['failed']} failed, {n['skipped']} skipped" for one, n in made.failures.items()
    }
    yield f"Cells of A: {failed['a']}; of B: {failed['b']}."
    yield (
        "Differences are B - A, samples of a prompt averaged first; in brackets the 95 % interval of "
        f"the difference ({RESAMPLES} resamples of prompts), none below 3 prompts. Each stands by "
        "itself: of many intervals, 1 in 20 misses by chance. Tables have the worst first."
    )
    few = ", ".join(f"{name} {count}" for name, count in made.few.items()) or "none"
    yield (
        f"A domain has rows of its own where a measure has {DOMAIN_PROMPTS} of its prompts; domains with "
        f"fewer pairs: {few}."
    )
    for why in dict.fromkeys(made.left_out.values()):
        names = [name for name, one in made.left_out.items() if one == why]
        yield f"Left out ({', '.join(names)}): {why}."


def _counted(names: Sequence[str]) -> str:
    """Return how many there are, and the first of them."""
    return f"{len(names)} ({listed(names)})" if names else "0"


def _tables(made: Comparison, short: ShortNames) -> Iterator[Part]:
    """Yield a table a measure and level, then one of its domains."""
    kept = {
        (row.cell, row.domain): row
        for name in ("read_frac", "kept_frac")
        for row in made.rows
        if row.measure.name == name
    }
    groups: dict[tuple[str, str], list[Difference]] = {}
    for row in made.rows:
        if row.measure.name in made.shown:
            groups.setdefault((row.measure.name, row.level), []).append(row)
    order = [one.name for one in MEASURES]
    for (name, level), rows in sorted(groups.items(), key=lambda g: order.index(g[0][0])):
        unit = f", {rows[0].measure.unit}" if rows[0].measure.unit else ""
        better = {0: "", 1: ", more is better", -1: ", less is better"}[rows[0].measure.better]
        at = "" if level == RECORDED else f", level {level}"
        title = f"{name}{unit}{at}{better}"
        yield _table(title, [row for row in rows if row.domain == ANY], short, kept)
        by_domain = [row for row in rows if row.domain != ANY]
        if by_domain:
            yield _table(f"{title}, by domain", by_domain, short, kept)
    hidden = {row.measure.name for row in made.rows} - set(made.shown)
    if hidden:
        names = ", ".join(name for name in order if name in hidden)
        yield Part("more", (f"Also compared, with --measure or --json: {names}.",))
    if any(row.measure.question == LAYERS for row in made.rows):
        yield Part("layers", ("KV heads of a layer are compared together, not one by one.",))


def _table(
    title: str,
    rows: Sequence[Difference],
    short: ShortNames,
    kept: Mapping[tuple[tuple[str, str, int], str], Difference],
) -> Part:
    """Return the differences of one measure at one level, the worst first."""
    ordered = sorted(rows, key=_badness)
    lines = []
    if len(ordered) > MOST_ROWS:
        lines.append(
            f"{len(ordered) - MOST_ROWS} of {len(ordered)} rows are left out: --json has all."
        )
    columns = ["name", "domain", "A", "B", "B - A", "95 %", "n", "kept", "flags", "verdict"]
    cells = [
        (
            short.cell(row),
            row.domain,
            number(row.a),
            number(row.b),
            number(row.interval.mean, signed=True),
            interval(row),
            str(row.interval.n),
            _kept(kept.get((row.cell, row.domain))),
            _flags(row),
            row.verdict,
        )
        for row in ordered[:MOST_ROWS]
    ]
    fixed = {"domain": ANY, "kept": "", "flags": ""}
    used = [
        place
        for place, name in enumerate(columns)
        if any(cell[place] != fixed.get(name) for cell in cells)
    ]
    if columns.index("flags") in used:
        lines.append(
            "flags, in sequences: c clipped or clamped, i nothing evicted (left out), m no value "
            "(left out)."
        )
    return Part(
        title,
        tuple(lines),
        tuple(columns[place] for place in used),
        tuple(tuple(cell[place] for place in used) for cell in cells),
    )


def _badness(row: Difference) -> tuple[float, str, int, str]:
    """Return what puts the worst first, what has no value last."""
    mean = row.interval.mean
    sign = row.measure.better or -1
    return (float("inf") if mean is None else sign * mean, row.name, row.place, row.domain)


def _kept(row: Difference | None) -> str:
    """Return the kept (or read) fraction, both sides' where they differ."""
    if row is None or row.a is None:
        return ""
    a, b = number(row.a), number(row.b)
    return a if a == b else f"{a} > {b}"


def _flags(row: Difference) -> str:
    counts = (("c", row.num_flagged), ("i", row.num_idle), ("m", row.num_missing))
    return " ".join(f"{sign}{count}" for sign, count in counts if count)


def _lone(made: Comparison, short: ShortNames) -> Iterator[Part]:
    """Yield what one side alone has."""
    cells = [("A", one) for one in made.only_a] + [("B", one) for one in made.only_b]
    if not cells:
        return
    places: dict[tuple[str, str, str], list[int]] = {}
    for side, (question, level, name, place) in cells:
        places.setdefault((side, level, short.name(question, name)), []).append(place)
    rows = [
        (side, level, name, ", ".join(str(place) for place in found if place != NO_PLACE))
        for (side, level, name), found in places.items()
    ]
    more = len(rows) - MOST_ROWS
    lines = (f"{more} of {len(rows)} rows are left out: --json has all.",) if more > 0 else ()
    columns = ("side", "level", "name", "size or layer")
    yield Part("on one side only, not compared", lines, columns, tuple(rows[:MOST_ROWS]))


def _gate(gate: Sequence[Outcome], short: ShortNames) -> Part:
    """Return what each condition found, each failed cell."""
    rows: list[tuple[str, ...]] = []
    for one in gate:
        text, said = one.condition.text, one.condition.said
        rows += [(text, "FAILED", short.cell(row), said(row)) for row in one.failed]
        rows += [(text, "UNKNOWN", short.cell(row), said(row)) for row in one.unknown]
        if one.passed and one.nearest:
            cells = f"{one.num_cells} cells; nearest: {short.cell(one.nearest)}"
            rows.append((text, "passed", cells, said(one.nearest)))
    failed = sum(not one.passed for one in gate)
    line = f"{failed} of {len(gate)} conditions failed." if failed else "All conditions passed."
    line += " A condition fails the gate where it holds; it is on B - A unless it begins with B."
    if bounds := sum(one.num_bounds for one in gate):
        line += f" Cells of bounds that no decoder has, not tested since no @ names them: {bounds}."
    return Part("gate", (line,), ("condition", "result", "cell", "value"), tuple(rows))
