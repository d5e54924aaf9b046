"""The gate of a comparison: conditions such as ``kl.high@snapkv:kept=0.25>0.02``, what they found."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.errors import GateFailedError, InputError, UsageError
from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.report.compare.measures import find_measure
from tracekit.report.compare.names import listed, number, told
from tracekit.report.compare.select import Selector
from tracekit.schema import ANY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracekit.report.compare.measures import Measure
    from tracekit.report.compare.names import ShortNames
    from tracekit.report.compare.pairs import Difference

_GRAMMAR = (
    "[B.]MEASURE[.low|.high|.mean][@NAME] OP NUMBER, OP one of > >= < <=. The condition is on the "
    "difference B - A (its mean, or an end of its 95 % interval); with B. on the mean of B itself; "
    "bounds, which no decoder has, are tested only where @NAME means them"
)

_CONDITION = re.compile(
    r"(?P<side>B\.)?(?P<measure>\w+)(?:\.(?P<end>low|high|mean))?(?:@(?P<name>[^<>]*[^<>\s]))?"
    r"\s*(?P<operator>>=|<=|>|<)\s*(?P<bound>[^<>=\s]+)"
)

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

_NAMED = 3
"""Failed cells that the error names; the output has all."""


@dataclass(frozen=True)
class Condition:
    """What must not hold in any cell.

    Parameters
    ----------
    text
        As it was written.
    measure
        What is looked at.
    of_b
        The mean of B itself, not the difference.
    end
        ``mean``, ``low`` or ``high``.
    selector
        Whose cells; None: all but bounds, which no decoder has.
    sign, bound
        Comparison and number: where ``value sign bound`` holds, the gate fails.
    """

    text: str
    measure: Measure
    of_b: bool
    end: str
    selector: Selector | None
    sign: str
    bound: float

    def covers(self, one: Difference) -> bool:
        """Whether this condition is on a cell; domains are shown, not tested."""
        return self._means(one) and (one.is_causal or self.selector is not None)

    def passes_over(self, one: Difference) -> bool:
        """Whether it would be on a cell, were that not a bound which it does not name."""
        return self._means(one) and not self.covers(one)

    def _means(self, one: Difference) -> bool:
        if one.measure != self.measure or one.domain != ANY:
            return False
        return self.selector is None or self.selector.takes(one.name, one.place)

    def value(self, one: Difference) -> float | None:
        """Return what is compared with the bound; None if there is none."""
        found: float | None = one.b if self.of_b else getattr(one.interval, self.end)
        return found

    def holds(self, value: float) -> bool:
        """Whether a value fails the gate."""
        return _OPERATORS[self.sign](value, self.bound)

    def said(self, one: Difference) -> str:
        """Return in words the value of a cell, or why it has none."""
        if self.value(one) is None:
            if one.interval.n:
                return f"no interval, {one.interval.n} of at least {MIN_SEQUENCES} prompts"
            return (
                f"no pair has a value ({one.num_idle} evicted nothing, {one.num_missing} without)"
            )
        if self.of_b:
            return (
                f"B has {number(one.b)} in {one.measure.name} ({one.level}), n = {one.interval.n}"
            )
        return told(one)


@dataclass(frozen=True)
class Outcome:
    """What a condition found.

    Parameters
    ----------
    condition
        The condition.
    num_cells
        Cells that it is on.
    num_bounds
        Bounds that it passed over, for no ``@`` names them.
    failed
        Those in which it holds, in the order of the comparison.
    unknown
        Those that have no such value: they fail too, for a gate that tests nothing must not pass.
    nearest
        Of those that passed, the one nearest to failing; None if none passed.
    """

    condition: Condition
    num_cells: int
    num_bounds: int
    failed: tuple[Difference, ...]
    unknown: tuple[Difference, ...]
    nearest: Difference | None

    @property
    def passed(self) -> bool:
        """Whether every cell has a value, and the condition holds in none."""
        return not self.failed and not self.unknown

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
            "num_bounds": self.num_bounds,
            "failed": [one.to_json() for one in self.failed],
            "unknown": [one.to_json() | {"why": condition.said(one)} for one in self.unknown],
            "nearest": self.nearest.to_json() if self.nearest else None,
        }


def parse_condition(text: str) -> Condition:
    """Return the condition that a text says.

    Raises
    ------
    UsageError
        If it is none, or its measure does not exist.
    """
    found = _CONDITION.fullmatch(text.strip())
    try:
        bound = float(found["bound"]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or not math.isfinite(bound):
        msg = f"{text!r} is no condition: write {_GRAMMAR}; such as 'kl>0.02'."
        raise UsageError(msg)
    if found["side"] and found["end"] in ("low", "high"):
        msg = f"{text!r}: an interval is of the difference alone; leave out B. or .{found['end']}."
        raise UsageError(msg)
    return Condition(
        text=text.strip(),
        measure=find_measure(found["measure"]),
        of_b=found["side"] is not None,
        end=found["end"] or "mean",
        selector=Selector(found["name"]) if found["name"] else None,
        sign=found["operator"],
        bound=bound,
    )


def judge(
    condition: Condition,
    rows: Sequence[Difference],
    left_out: Mapping[str, str],
    short: ShortNames,
) -> Outcome:
    """Return what a condition found in all differences; ``left_out`` says why a measure has none.

    Raises
    ------
    InputError
        If the condition is on no cell.
    """
    covered = [one for one in rows if condition.covers(one)]
    num_bounds = sum(condition.passes_over(one) for one in rows)
    if not covered:
        name = condition.measure.name
        known = dict.fromkeys(short.cell(one) for one in rows if one.measure == condition.measure)
        there = f"compared by {name}: {listed(known) or 'nothing'}; bounds only where @ names them"
        msg = (
            f"the gate {condition.text!r} tests nothing, so it cannot pass "
            f"({left_out.get(name) or there})."
        )
        raise InputError(msg)
    unknown, failed, passed = [], [], []
    for one in covered:
        value = condition.value(one)
        if value is None:
            unknown.append(one)
        elif condition.holds(value):
            failed.append(one)
        else:
            passed.append((value, one))
    worst = max if condition.sign[0] == ">" else min
    nearest = worst(passed, key=lambda pair: pair[0])[1] if passed else None
    return Outcome(condition, len(covered), num_bounds, tuple(failed), tuple(unknown), nearest)


def raise_if_failed(outcomes: Sequence[Outcome], short: ShortNames) -> None:
    """Raise ``GateFailedError``, with the first cells that failed and their number, if any did."""
    failed = [(one.condition, row) for one in outcomes for row in one.failed]
    unknown = [(one.condition, row) for one in outcomes for row in one.unknown]
    named = [f"{short.cell(row)} {one.said(row)} ({one.text})" for one, row in failed + unknown]
    if not named:
        return
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    tested = sum(one.num_cells for one in outcomes)
    msg = (
        f"the gate failed: {len(failed)} of {tested} tested cells over the bound, {len(unknown)} "
        f"without a value: {'; '.join(named[:_NAMED])}{more}."
    )
    raise GateFailedError(msg)
