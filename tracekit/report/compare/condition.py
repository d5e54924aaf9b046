"""One condition of a gate: ``kl>0.02``, ``kl.high@snapkv:kept=0.25>0.02``, ``B.hit<0.99``."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.errors import UsageError
from tracekit.report.compare.measures import find_measure
from tracekit.report.compare.names import Selector
from tracekit.schema import ANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.report.compare.measures import Measure
    from tracekit.report.compare.pairs import Difference

GRAMMAR = (
    "[B.]MEASURE[.low|.high|.mean][@NAME] OP NUMBER, OP one of > >= < <=. The condition is on the "
    "difference B - A (its mean, or an end of its 95 % interval); with B. on the mean of B itself"
)
"""How a condition is written."""

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
        Whose cells; None: all.
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
        msg = f"{text!r} is no condition: write {GRAMMAR}; such as 'kl>0.02'."
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
