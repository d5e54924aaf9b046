"""How sure statistics of steps are: by resampling sequences, or as llama.cpp has it, over tokens.

Numpy alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import numpy as np

from tracekit.errors import UsageError
from tracekit.measure.stats import MIN_SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.token_means import MeanStatistic
    from tracekit.measure.token_table import TokenTable


class Bar(NamedTuple):
    """Interval and standard error of a statistic; None is what does not apply."""

    low: float | None = None
    high: float | None = None
    error: float | None = None


class Errors(ABC):
    """A kind of error."""

    name: ClassVar[str]
    """Name of the convention that it belongs to."""

    @abstractmethod
    def bars(self, statistics: Sequence[MeanStatistic], table: TokenTable) -> list[Bar]:
        """Return the error of each statistic of a table that has steps."""


@final
@dataclass(frozen=True)
class SequenceBootstrap(Errors):
    """Percentile bootstrap: whole sequences are drawn with replacement, both runs together.

    Tokens of one text are not independent of each other. All statistics see the same draws, those
    of ``stats.bootstrap_mean``; sums of sequences are drawn, not tokens.

    Parameters
    ----------
    seed
        Of the resampling: same steps and seed, same intervals.
    resamples
        Draws, at least 1 000.
    level
        Share of the draws that an interval holds.

    Raises
    ------
    UsageError
        If a parameter is out of range.
    """

    name: ClassVar[str] = "tracekit"

    seed: int
    resamples: int = 1000
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.resamples < 1000 or not 0 < self.level < 1:
            msg = (
                f"bootstrap of {self.resamples} resamples at level {self.level:g}: give 1000 or "
                "more, and a level in (0, 1)."
            )
            raise UsageError(msg)

    def bars(self, statistics: Sequence[MeanStatistic], table: TokenTable) -> list[Bar]:
        """Return intervals, whose ends are draws; None below three sequences."""
        n = table.num_sequences
        if n < MIN_SEQUENCES:
            return [Bar() for _ in statistics]
        drawn_BS = np.random.default_rng(self.seed).integers(n, size=(self.resamples, n))
        means = table.resampled(drawn_BS)
        ends = [(1 - self.level) / 2, (1 + self.level) / 2]
        bars = []
        for one in statistics:
            with np.errstate(over="ignore", invalid="ignore"):
                drawn_B = one.value(means)
            low, high = np.quantile(drawn_B, ends, method="inverted_cdf")
            bars.append(Bar(number_or_none(low), number_or_none(high)))
        return bars


@final
@dataclass(frozen=True)
class TokenGaussian(Errors):
    """Gaussian standard errors that take tokens for independent, as llama.cpp prints them.

    Within a text they are not, so these are too small; they are for comparing with that tool.
    """

    name: ClassVar[str] = "llama.cpp"

    def bars(self, statistics: Sequence[MeanStatistic], table: TokenTable) -> list[Bar]:
        """Return standard errors; None for a single token and where a value is not finite."""
        means, n = table.micro(), table.num_steps
        bars = []
        for one in statistics:
            if one.slope is None or n < 2:
                bars.append(Bar())
                continue
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                error = np.std(one.slope(table.columns, means)) / np.sqrt(n - 1)
            bars.append(Bar(error=number_or_none(error)))
        return bars


def number_or_none(value: float | np.ndarray) -> float | None:
    """Return a number as a float, NaN as None."""
    return None if np.isnan(value) else float(value)
