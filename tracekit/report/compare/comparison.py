"""What a comparison found: the ledger, the pairs, the differences and the gate, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tracekit.report.compare.gate import raise_if_failed
from tracekit.report.compare.ledger import what_changed
from tracekit.report.compare.pairs import RESAMPLES
from tracekit.report.compare.side import CELL
from tracekit.report.verdict.yardstick import DOMAIN_PROMPTS

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.report.compare.gate import Outcome
    from tracekit.report.compare.ledger import Entry
    from tracekit.report.compare.match import Match
    from tracekit.report.compare.names import ShortNames
    from tracekit.report.compare.pairs import Difference

Cell = tuple[str, str, str, int]
"""Question, level, name and place: ``side.CELL`` with the question before it."""

_CELL = ("question", *CELL)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What B is against A, the baseline.

    Parameters
    ----------
    folder_a, folder_b
        The results.
    entries
        The ledger.
    match
        Which sequences are pairs.
    rows
        Differences B - A: by question, cell, measure, of all prompts and then by domain.
    shown
        Names of the measures that tables have; ``rows`` has all.
    only_a, only_b
        Cells that one side alone has.
    few
        Prompts by domain, of the domains that have too few for a difference of their own.
    left_out
        By name of a measure that is not compared: why.
    failures
        Of both sides: how many cells failed, and how many were skipped.
    gate
        What each condition found.
    short
        What cells are called in texts.
    """

    folder_a: Path
    folder_b: Path
    entries: tuple[Entry, ...]
    match: Match
    rows: tuple[Difference, ...]
    shown: tuple[str, ...]
    only_a: tuple[Cell, ...]
    only_b: tuple[Cell, ...]
    few: dict[str, int]
    left_out: dict[str, str]
    failures: dict[str, dict[str, int]]
    gate: tuple[Outcome, ...]
    short: ShortNames

    @property
    def changed(self) -> str:
        """What of model, tokenizer, recording and replay changed, in a sentence."""
        return what_changed(self.entries)

    def raise_if_failed(self) -> None:
        """Raise ``GateFailedError`` if a condition of the gate failed."""
        raise_if_failed(self.gate, self.short)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        match = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(self.match).items()
        }
        return {
            "a": str(self.folder_a),
            "b": str(self.folder_b),
            "difference": "b - a, paired by prompt",
            "resamples": RESAMPLES,
            "changed": self.changed,
            "ledger": [asdict(one) | {"status": one.status} for one in self.entries],
            "sequences": match,
            "differences": [one.to_json() for one in self.rows],
            "only_a": [dict(zip(_CELL, one, strict=True)) for one in self.only_a],
            "only_b": [dict(zip(_CELL, one, strict=True)) for one in self.only_b],
            "domains_with_too_few_prompts": self.few,
            "min_prompts_of_a_domain": DOMAIN_PROMPTS,
            "not_compared": self.left_out,
            "failures": self.failures,
            "gate": [one.to_json() for one in self.gate],
            "passed": all(one.passed for one in self.gate) if self.gate else None,
        }
