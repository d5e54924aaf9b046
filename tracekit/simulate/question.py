"""What is asked of each sequence: cells by name, and what is known of those that are not made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tracekit.errors import TracekitError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd
    import pyarrow as pa

FAILS = (Exception,)
"""What may go wrong in a cell without stopping the others: estimators and policies may be anybody's."""

Tables = dict[str, "pa.Table"]
"""Rows of a cell, by the name of their table."""


@dataclass(kw_only=True)
class Answers:
    """Cells of one sequence by name; why others were not made, or what went wrong."""

    made: dict[str, Tables] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Question(ABC):
    """A question that a plan asks of each sequence of a trace."""

    name: ClassVar[str]
    """Part of the keys of its cells."""
    tables: ClassVar[tuple[str, ...]]
    """Tables of which a cell has rows; the first one is always there."""

    @property
    @abstractmethod
    def cells(self) -> list[str]:
        """Names of the cells of a sequence."""

    @property
    @abstractmethod
    def why_not(self) -> str:
        """Why a cell has no rows on a sequence, where nothing more is known."""

    def content(self, cell: str) -> str:
        """Return what the numbers of a cell depend on beside its name: the hash of a file."""
        del cell
        return ""

    @abstractmethod
    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return some cells of a sequence, ``sequence`` its row of ``trace.sequences``."""


def all_or_each(
    compute: Callable[[Sequence[str]], Mapping[str, Tables]], cells: Sequence[str]
) -> Answers:
    """Return cells and failures; if they fail together each is tried alone, to lose only its own."""
    try:
        return Answers(made=dict(compute(cells)))
    except FAILS as error:
        if len(cells) == 1:
            return Answers(failed={cells[0]: sentence(error)})
    answers = Answers()
    for cell in cells:
        one = all_or_each(compute, [cell])
        answers.made |= one.made
        answers.failed |= one.failed
    return answers


def seed_of(sequence: pd.Series[Any], seed: int) -> int:
    """Return the seed of a plan on one sequence; imported sequences have none of their own."""
    own = sequence["seed"]
    return seed if np.isnan(own) else int(own) ^ seed


def sentence(error: Exception) -> str:
    """Return what went wrong; our own errors are sentences, others need their kind."""
    return str(error) if isinstance(error, TracekitError) else f"{type(error).__name__}: {error}"
