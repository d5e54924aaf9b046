"""Prompts in two halves, so that what is chosen on one is judged on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.simulate.tries import Tries


@dataclass(frozen=True, eq=False)
class Halves:
    """Which of N sequences are of the same prompt, P of them, and the half of each prompt.

    Parameters
    ----------
    order_N, start_P
        The sequences, those of a prompt together, and the place of the first of each prompt.
    half_P
        0 chooses, 1 judges.
    """

    order_N: np.ndarray
    start_P: np.ndarray
    half_P: np.ndarray

    @classmethod
    def of(cls, tries: Tries, sequence_id: pd.Series[Any]) -> Halves:
        """Return the prompts of sequences, halved in turn, one domain after the other.

        Parameters
        ----------
        tries
            The sequences, with their domains.
        sequence_id
            Their names in the order in which prompts take turns.
        """
        firsts = tries.steps.drop_duplicates("sequence_id").astype(str)
        domains = dict(zip(firsts["sequence_id"], firsts["domain"], strict=True))
        names = [name for name in sequence_id.astype(str).unique() if name in domains]
        half: dict[str, int] = {}
        for name in sorted(names, key=domains.__getitem__):
            half.setdefault(_prompt(name), len(half) % 2)
        prompts, number_N = np.unique(
            [_prompt(one) for one in tries.sequences], return_inverse=True
        )
        order_N = np.argsort(number_N, kind="stable")
        start_P = np.searchsorted(number_N[order_N], np.arange(len(prompts)))
        return cls(order_N, start_P, np.array([half.get(one, 0) for one in prompts]))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return sums over the sequences of each prompt, 0 in the half that is not its own.

        Parameters
        ----------
        values
            Of each sequence, [C, G, N].

        Returns
        -------
        numpy.ndarray
            [2, C, G, P].
        """
        sums_CGP = np.add.reduceat(values[..., self.order_N], self.start_P, axis=-1)
        is_own_H11P = np.arange(2)[:, None, None, None] == self.half_P
        return np.where(is_own_H11P, sums_CGP, 0)


def _prompt(sequence: str) -> str:
    """Return the prompt, or text, of which a sequence is a sample, or a window."""
    return sequence.rsplit("#", 1)[0]
