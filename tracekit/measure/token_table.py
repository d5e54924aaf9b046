"""Steps of many sequences as one table, and means over any weighting of its sequences.

Numpy alone: reports read this without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracekit.measure.token_rows import NextToken

Means = dict[str, np.ndarray]
"""Mean of each column: one number each, or one a resample."""


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Columns of all steps that have a distribution, sequence after sequence.

    Parameters
    ----------
    columns
        float64 arrays of N steps.
    start_S
        First step of each sequence that has one, int64 [S].
    num_steps
        N.
    num_left_out
        Steps that have no distribution in one of the runs.
    """

    columns: Mapping[str, np.ndarray]
    start_S: np.ndarray
    num_steps: int
    num_left_out: int = 0

    @classmethod
    def of(cls, sequences: Sequence[NextToken]) -> TokenTable:
        """Return the table of some sequences; those without a step are left out."""
        kept = [rows.where(rows.has_distribution) for rows in sequences]
        length_S = np.array([len(rows) for rows in kept if len(rows)], dtype=np.int64)
        num_steps = int(length_S.sum())
        num_left_out = sum(len(rows) for rows in sequences) - num_steps
        return cls(_columns(kept), np.cumsum(length_S) - length_S, num_steps, num_left_out)

    @classmethod
    def of_trials(cls, name: str, is_won: Sequence[bool]) -> TokenTable:
        """Return a table of one column, to which each sequence gives one step, 0 or 1."""
        won = np.asarray(is_won, dtype=np.float64)
        return cls({name: won}, np.arange(len(won)), len(won))

    @property
    def num_sequences(self) -> int:
        """Sequences that have a step."""
        return len(self.start_S)

    @property
    def length_S(self) -> np.ndarray:
        """Steps of each sequence, int64 [S]."""
        return np.diff(self.start_S, append=self.num_steps)

    def sums(self) -> dict[str, np.ndarray]:
        """Return the sum of each column over each sequence, float64 [S]."""
        with np.errstate(invalid="ignore"):
            return {name: np.add.reduceat(x, self.start_S) for name, x in self.columns.items()}

    def micro(self) -> Means:
        """Return means over all steps alike."""
        with np.errstate(invalid="ignore"):
            return {name: np.mean(x) for name, x in self.columns.items()}

    def macro(self) -> Means:
        """Return means over sequences of their means."""
        with np.errstate(invalid="ignore"):
            return {name: np.mean(sum_S / self.length_S) for name, sum_S in self.sums().items()}

    def resampled(self, drawn_BS: np.ndarray) -> Means:
        """Return means over all steps of sequences drawn with replacement, [B] each.

        Parameters
        ----------
        drawn_BS
            Numbers of the sequences of each resample, int64 [B, S].
        """
        steps_B = self.length_S[drawn_BS].sum(1)
        with np.errstate(invalid="ignore"):
            return {name: sum_S[drawn_BS].sum(1) / steps_B for name, sum_S in self.sums().items()}


def _columns(kept: Sequence[NextToken]) -> dict[str, np.ndarray]:
    def joined(name: str) -> np.ndarray:
        parts = [np.asarray(getattr(rows, name), dtype=np.float64) for rows in kept]
        return np.concatenate([np.zeros(0), *parts])

    columns = {
        "nll_full": joined("nll_full"),
        "nll_pruned": joined("nll_pruned"),
        "kl": joined("kl_nats"),
        "delta_p": joined("delta_p"),
        "same_top": joined("same_top"),
        "jsd": joined("jsd_nats"),
        "margin_full": joined("top1_margin_full"),
        "margin_pruned": joined("margin_pruned"),
    }
    full, pruned = (_centred(columns[name]) for name in ("nll_full", "nll_pruned"))
    # Second moments of what is centred lose nothing to their difference.
    with np.errstate(invalid="ignore"):
        return columns | {
            "full_c": full,
            "pruned_c": pruned,
            "full_sq": full**2,
            "pruned_sq": pruned**2,
            "cross": full * pruned,
            "delta_p_sq": columns["delta_p"] ** 2,
        }


def _centred(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return values - values.mean() if len(values) else values
