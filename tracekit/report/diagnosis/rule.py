"""One rule of the diagnosis: a symptom that is measured, its likely cause, and what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

    from tracekit.report.load import Results
    from tracekit.report.options import Options

    Find = Callable[[Results, Options], "Finding | None"]


@dataclass(frozen=True)
class Finding:
    """What a rule measured: whether it fires, and the numbers with their level and n.

    ``fires`` is None where the interval lies across the threshold: then these data cannot tell.
    """

    fires: bool | None
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule.

    Parameters
    ----------
    symptom
        What a user would notice.
    threshold
        When it fires.
    cause, remedy
        What is likely behind it, and what to try.
    needs
        What must be in the results for it to be checked.
    find
        Measures it; None where the results do not hold what it needs.
    """

    symptom: str
    threshold: str
    cause: str
    remedy: str
    needs: str
    find: Find


def over(rows: pd.DataFrame) -> str:
    """Return the level of some cells, and how many sequences they are of."""
    return f"level {rows['level'].iloc[0]}, n\u00a0=\u00a0{rows['sequence_id'].nunique()}"


def rule(
    symptom: str, *, threshold: str, cause: str, remedy: str, needs: str
) -> Callable[[Find], Rule]:
    """Make a rule of the function that measures it."""

    def made(find: Find) -> Rule:
        return Rule(
            symptom=symptom,
            threshold=threshold,
            cause=cause,
            remedy=remedy,
            needs=needs,
            find=find,
        )

    return made
