"""What each predicted token lost: a run under a reduced cache beside the run under the full one.

Numpy alone: tables and reports hold these rows without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True, eq=False)
class NextToken:
    """Measures of the scored rows of a sequence, one number a row.

    Parameters
    ----------
    nll_full, nll_pruned
        Surprisal of the token that came, nats, float64 [R].
    kl_nats
        KL(full || pruned), float64 [R].
    jsd_nats
        Jensen-Shannon divergence, at most ln 2, float64 [R].
    delta_p
        Probability of the token that came, pruned minus full, float64 [R].
    same_top
        Whether the most likely token is the same, the lower id of equals, bool [R].
    entropy_full_nats
        Entropy of the full run, float64 [R].
    top1_margin_full
        Highest minus second highest logit of the full run, nats, float64 [R].
    margin_pruned
        Pruned logit of the full run's most likely token minus the best other, nats, float64 [R]:
        not above 0 where it is no longer the most likely.
    hit, hit_full
        Whether the most likely token is the one that came, pruned and full, bool [R].

    Notes
    -----
    A row that has no distribution in one of the runs (NaN, +inf, all masked) is NaN in each float
    column and False in each other one. Margins are NaN where the vocabulary has one token.
    """

    nll_full: np.ndarray
    nll_pruned: np.ndarray
    kl_nats: np.ndarray
    jsd_nats: np.ndarray
    delta_p: np.ndarray
    same_top: np.ndarray
    entropy_full_nats: np.ndarray
    top1_margin_full: np.ndarray
    margin_pruned: np.ndarray
    hit: np.ndarray
    hit_full: np.ndarray

    def __len__(self) -> int:
        return len(self.nll_full)

    @property
    def has_distribution(self) -> np.ndarray:
        """Which rows have a distribution in both runs, bool [R]."""
        has_R: np.ndarray = ~np.isnan(self.nll_pruned)
        return has_R

    def where(self, chosen_R: np.ndarray) -> NextToken:
        """Return the rows of a bool mask or an array of row numbers."""
        return NextToken(**{f.name: getattr(self, f.name)[chosen_R] for f in fields(self)})
