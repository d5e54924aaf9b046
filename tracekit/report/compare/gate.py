"""The gate of a comparison: what its conditions found, and the error if one of them holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.errors import GateFailedError, InputError
from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.compare.told import listed, number, told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracekit.report.compare.condition import Condition
    from tracekit.report.compare.pairs import Difference
    from tracekit.report.compare.told import ShortNames

_NAMED = 3
"""Failed cells that the error names; the output has all."""


@dataclass(frozen=True)
class Outcome:
    """What a condition found.

    Parameters
    ----------
    condition
        The condition.
    num_cells
        Cells that it is on.
    failed
        Those in which it holds, in the order of the comparison.
    unknown
        Those that have no such value: they fail too, for a gate that tests nothing must not pass.
    nearest
        Of those that passed, the one nearest to failing; None if none passed.
    """

    condition: Condition
    num_cells: int
    failed: tuple[Difference, ...]
    unknown: tuple[Difference, ...]
    nearest: Difference | None

    @property
    def passed(self) -> bool:
        """Whether every cell has a value, and the condition holds in none."""
        return not self.failed and not self.unknown

    def why_failed(self, one: Difference) -> str:
        """Return the value that a cell failed with."""
        if self.condition.of_b:
            where = f"{one.measure.name} ({one.level})"
            return f"B has {number(one.b)} in {where}, n = {one.interval.n}"
        return told(one)

    def why_unknown(self, one: Difference) -> str:
        """Return why a cell has no value."""
        if one.interval.n:
            return f"no interval, {one.interval.n} of at least {MIN_SEQUENCES} prompts"
        return f"no pair has a value ({one.num_idle} evicted nothing, {one.num_missing} without)"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        condition = self.condition
        return {
            "condition": condition.text,
            "measure": condition.measure.name,
            "of": "B" if condition.of_b else "B - A",
            "end": condition.end,
            "name": condition.selector.text if condition.selector else None,
            "operator": condition.sign,
            "bound": condition.bound,
            "passed": self.passed,
            "num_cells": self.num_cells,
            "failed": [one.to_json() for one in self.failed],
            "unknown": [one.to_json() | {"why": self.why_unknown(one)} for one in self.unknown],
            "nearest": self.nearest.to_json() if self.nearest else None,
        }


def judge(
    conditions: Sequence[Condition],
    rows: Sequence[Difference],
    left_out: Mapping[str, str],
    short: ShortNames,
) -> tuple[Outcome, ...]:
    """Return what each condition found.

    Parameters
    ----------
    conditions
        Of the gate.
    rows
        All differences.
    left_out
        By measure: why it is not compared at all.
    short
        Names of cells.

    Raises
    ------
    InputError
        If a condition is on no cell.
    """
    return tuple(_outcome(one, rows, left_out, short) for one in conditions)


def _outcome(
    condition: Condition,
    rows: Sequence[Difference],
    left_out: Mapping[str, str],
    short: ShortNames,
) -> Outcome:
    covered = [one for one in rows if condition.covers(one)]
    if not covered:
        name = condition.measure.name
        known = dict.fromkeys(short.cell(one) for one in rows if one.measure == condition.measure)
        why = left_out.get(name) or (
            f"compared by {name}: {listed(known)}"
            if known
            else f"nothing here has {name} on both sides"
        )
        msg = f"the gate {condition.text!r} tests nothing, so it cannot pass ({why})."
        raise InputError(msg)
    valued = [(one, condition.value(one)) for one in covered]
    failed = [one for one, value in valued if value is not None and condition.holds(value)]
    passed = [
        (value, one) for one, value in valued if value is not None and not condition.holds(value)
    ]
    worst = max if condition.sign[0] == ">" else min
    return Outcome(
        condition=condition,
        num_cells=len(covered),
        failed=tuple(failed),
        unknown=tuple(one for one, value in valued if value is None),
        nearest=worst(passed, key=lambda pair: pair[0])[1] if passed else None,
    )


def raise_if_failed(outcomes: Sequence[Outcome], short: ShortNames) -> None:
    """Raise if a condition failed.

    Raises
    ------
    GateFailedError
        That says how many cells failed, and names the first.
    """
    failed = [(one, row) for one in outcomes for row in one.failed]
    unknown = [(one, row) for one in outcomes for row in one.unknown]
    if not failed and not unknown:
        return
    named = [
        f"{short.cell(row)} {one.why_failed(row)} ({one.condition.text})" for one, row in failed
    ]
    named += [
        f"{short.cell(row)} {one.why_unknown(row)} ({one.condition.text})" for one, row in unknown
    ]
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    tested = sum(one.num_cells for one in outcomes)
    msg = (
        f"the gate failed: {len(failed)} of {tested} tested cells over the bound, {len(unknown)} "
        f"without a value: {'; '.join(named[:_NAMED])}{more}."
    )
    raise GateFailedError(msg)
