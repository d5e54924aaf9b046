"""One claim under test: what is claimed, the rule that judges it, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.report.formats import percent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracekit.report.load import Results
    from tracekit.report.options import Options

SUPPORTED, REFUTED, UNTOLD = "supported", "not supported", "cannot be told here"
VERDICTS = (SUPPORTED, REFUTED, UNTOLD)


@dataclass(frozen=True)
class Said:
    """What these data say of a claim: the verdict, the numbers, and how many they are over."""

    verdict: str
    says: str
    n: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim.

    Parameters
    ----------
    claim
        In the words of those who make it.
    rule
        When it counts as supported, and when not; otherwise it cannot be told.
    test
        The rule, on results.
    """

    claim: str
    rule: str
    test: Callable[[Results, Options], Said]


def claim(text: str, *, rule: str) -> Callable[[Callable[[Results, Options], Said]], Claim]:
    """Make a claim of the function that tests it."""

    def made(test: Callable[[Results, Options], Said]) -> Claim:
        return Claim(claim=text, rule=rule, test=test)

    return made


def share(row: Mapping[Any, Any]) -> str:
    """Return the mean of a row with its interval, in per cent."""
    return f"{percent(row['mean'])} [{percent(row['low'])}, {percent(row['high'])}]"


def untold(why: str) -> Said:
    """Return that these data cannot tell, and why."""
    return Said(UNTOLD, why, "0")


def verdict_of(side: bool | None) -> str:
    """Return the verdict on what is claimed, by the side on which the interval lies (``sides``)."""
    return UNTOLD if side is None else SUPPORTED if side else REFUTED
