"""Compares two results folders: which prompts are pairs, what changed, by how much, and the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError, UsageError
from tracekit.registry import unknown
from tracekit.report.compare.comparison import Comparison
from tracekit.report.compare.gate import judge, parse_condition
from tracekit.report.compare.ledger import ledger, tokenizers_differ
from tracekit.report.compare.match import match_sequences
from tracekit.report.compare.measures import MEASURES, RECORDED, find_measure
from tracekit.report.compare.names import ShortNames
from tracekit.report.compare.pairs import differences
from tracekit.report.compare.select import as_pair, only
from tracekit.report.compare.side import CELL, read_side
from tracekit.report.load import LEVELS
from tracekit.report.verdict.yardstick import DOMAIN_PROMPTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tracekit.report.compare.comparison import Cell
    from tracekit.report.compare.gate import Condition
    from tracekit.report.compare.match import Match
    from tracekit.report.compare.measures import Measure
    from tracekit.report.compare.pairs import Difference
    from tracekit.report.compare.side import Side

_BESIDE = (find_measure("kept_frac"), find_measure("read_frac"))
"""What a difference is read beside, whatever was asked for."""


def compare(
    a: Path,
    b: Path,
    *,
    policy: str | None = None,
    against: str | None = None,
    measures: Sequence[str] = (),
    level: str | None = None,
    conditions: Sequence[str] = (),
    seed: int = 0,
) -> Comparison:
    """Return how the results in ``b`` differ from those in ``a``, the baseline, prompt by prompt.

    Parameters
    ----------
    a, b
        Folders of ``tracekit simulate``; the same one twice to compare two of its policies.
    policy
        Text of a policy or scheme of ``b``, whole or a part of it (``snapkv:kept=0.25``); None: all
        that both sides have by the same canonical text.
    against
        That of ``a`` which it is held against; None: the same.
    measures
        Names or short names of the measures to show; none: the usual ones.
    level
        One level of truth; None: each by itself.
    conditions
        Of the gate, such as ``kl.high@snapkv:kept=0.25>0.02``.
    seed
        Of the bootstrap.

    Raises
    ------
    UsageError
        If a condition, measure or level does not exist, or a text means several policies.
    InputError
        If a folder is damaged or of another version, the two have nothing in common, or a condition
        of the gate is on nothing.
    """
    parsed = tuple(parse_condition(one) for one in conditions)
    asked = tuple(dict.fromkeys(find_measure(one) for one in measures))
    if level is not None and level not in LEVELS:
        raise UsageError(unknown("level", level, list(LEVELS)))
    side_a, side_b = _sides(a, b, policy, against)
    match = match_sequences(side_a, side_b)
    left_out = _left_out(side_a, side_b, match)
    wanted = (*asked, *(one.measure for one in parsed), *_BESIDE) if asked else MEASURES
    rows, gone, lone = _rows(side_a, side_b, match, wanted, left_out, level, seed)
    _refuse_nothing(side_a, side_b, rows, asked, left_out)
    of_rows = [(row.measure.question, row.name) for row in rows]
    short = ShortNames(of_rows + [(one[0], one[2]) for side in lone for one in side])
    return Comparison(
        folder_a=a,
        folder_b=b,
        entries=ledger(side_a.run, side_b.run),
        match=match,
        rows=rows,
        shown=_shown(asked, parsed, rows),
        only_a=lone[0],
        only_b=lone[1],
        few=_few(side_a, match),
        left_out=left_out,
        failures={name: _failures(side.run) for name, side in (("a", side_a), ("b", side_b))},
        # What B does not have any more cannot pass.
        gate=tuple(judge(one, (*rows, *gone), left_out, short) for one in parsed),
        short=short,
    )


def _sides(a: Path, b: Path, policy: str | None, against: str | None) -> tuple[Side, Side]:
    """Return both sides, read once if they are one folder, with the policies that were chosen."""
    if policy is None and against is not None:
        msg = f"--against {against!r} needs --policy: the one that is held against it."
        raise UsageError(msg)
    is_same = a.resolve() == b.resolve()
    if is_same and (against is None or against == policy):
        msg = f"{a} is given twice: name two of its policies with --policy and --against."
        raise UsageError(msg)
    side_a = read_side(a)
    side_b = side_a if is_same else read_side(b)
    if policy is None:
        return side_a, side_b
    side_a, side_b = only(side_a, against or policy), only(side_b, policy)
    return (side_a, side_b) if against is None else as_pair(side_a, side_b, against, policy)


def _rows(
    a: Side,
    b: Side,
    match: Match,
    wanted: Sequence[Measure],
    left_out: Mapping[str, str],
    level: str | None,
    seed: int,
) -> tuple[tuple[Difference, ...], tuple[Difference, ...], tuple[tuple[Cell, ...], ...]]:
    """Return all differences, those of cells that B lacks, and the cells that A, or B, has alone."""
    rows: list[Difference] = []
    gone: list[Difference] = []
    lone: tuple[list[Cell], list[Cell]] = ([], [])
    for question in a.frames:
        frames = tuple(_at_level(side.frames[question], level) for side in (a, b))
        cells = [set(frame[list(CELL)].itertuples(index=False, name=None)) for frame in frames]
        lone[0].extend((question, *one) for one in sorted(cells[0] - cells[1]))
        lone[1].extend((question, *one) for one in sorted(cells[1] - cells[0]))
        own = [one for one in MEASURES if one.question == question and one in wanted]
        used = [one for one in own if one.needs_given or one.name not in left_out]
        for one in differences((frames[0], frames[1]), (a, b), match, used, seed=seed):
            (rows if one.cell in cells[1] else gone).append(one)
    return tuple(rows), tuple(gone), (tuple(lone[0]), tuple(lone[1]))


def _at_level(frame: Any, level: str | None) -> Any:
    return frame if level is None else frame[frame["level"].isin([level, RECORDED])]


def _left_out(a: Side, b: Side, match: Match) -> dict[str, str]:
    """Return why measures are not compared, by name."""
    if tokenizers_differ(a.run, b.run):
        why = "the tokenizers differ: a number a token is of other tokens on each side"
        return {one.name: why for one in MEASURES if one.is_per_token}
    if len(match.same_given) == len(match.paired):
        return {}
    num = len(match.paired) - len(match.same_given)
    why = (
        f"perplexity compares only on given text that is the same on both sides: {num} of "
        f"{len(match.paired)} pairs are generated"
    )
    return {one.name: why for one in MEASURES if one.needs_given}


def _shown(
    asked: Sequence[Measure], parsed: Sequence[Condition], rows: Sequence[Difference]
) -> tuple[str, ...]:
    """Return the measures asked for; without any the usual ones, or all if there are none of them."""
    there = dict.fromkeys(row.measure for row in rows)
    chosen = asked or [one for one in there if one.is_headline] or list(there)
    return tuple(dict.fromkeys(one.name for one in (*chosen, *(one.measure for one in parsed))))


def _few(a: Side, match: Match) -> dict[str, int]:
    prompts: dict[str, set[str]] = {}
    for name in match.paired:
        prompts.setdefault(a.sequences[name]["domain"], set()).add(a.sequences[name]["prompt_id"])
    return {
        name: len(found) for name, found in sorted(prompts.items()) if len(found) < DOMAIN_PROMPTS
    }


def _failures(run: dict[str, Any]) -> dict[str, int]:
    return {name: len(run[name]) for name in ("failed", "skipped")}


def _refuse_nothing(
    a: Side,
    b: Side,
    rows: Sequence[Difference],
    asked: Sequence[Measure],
    left_out: Mapping[str, str],
) -> None:
    """Raise if the sides have nothing in common that was asked for."""
    if asked and not any(row.measure in asked for row in rows):
        names = ", ".join(one.name for one in asked)
        why = "; ".join(dict.fromkeys(filter(None, (left_out.get(one.name) for one in asked))))
        msg = (
            f"{a.folder} and {b.folder} have no cell with {names} on both sides{why and ': '}{why}."
        )
        raise InputError(msg)
    if not asked and all(row.measure.question == RECORDED for row in rows):
        has = " and ".join(
            f"{side.folder} has {sum(f['name'].nunique() for f in side.frames.values()) - 1}"
            for side in (a, b)
        )
        msg = (
            f"nothing in common: {has} policies and schemes, none with the same text, level and "
            "measure; name two with --policy and --against, or simulate the same ones."
        )
        raise InputError(msg)
