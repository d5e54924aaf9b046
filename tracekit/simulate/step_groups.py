"""Groups of the scored steps that candidate sets are tried on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit import schema
from tracekit.simulate.logit_stats import ENTROPY_ENDS, entropy_names

if TYPE_CHECKING:
    import pandas as pd

OF_SEQUENCES = ("all", "domain")
"""Groupings that hold whole sequences and are told most of."""


@dataclass(frozen=True, eq=False)
class Grouping:
    """One way to group the steps.

    Parameters
    ----------
    name
        What they are grouped by.
    groups
        Names of the groups, in order.
    code_S
        Group of each step, -1 for none.
    """

    name: str
    groups: tuple[str, ...]
    code_S: np.ndarray


def step_groups(steps: pd.DataFrame) -> list[Grouping]:
    """Return all groupings of some steps.

    Parameters
    ----------
    steps
        Rows of ``schema.SCORED``, the steps of a sequence together and in order.

    Returns
    -------
    list of Grouping
        ``all``, ``domain``, ``bucket`` (length), ``entropy``, ``class`` of the recorded token,
        ``position`` (number of the scored step of its sequence, from 1, in powers of two) and, where
        a step has one, ``regime``.
    """
    whole_S = np.zeros(len(steps), dtype=np.int64)
    found = [Grouping("all", (schema.ANY,), whole_S)]
    found += [_of_names(name, steps[name]) for name in ("domain", "bucket")]
    entropy_S = steps["entropy_nats"].to_numpy(np.float64)
    code_S = np.where(np.isnan(entropy_S), -1, np.digitize(entropy_S, ENTROPY_ENDS))
    found.append(Grouping("entropy", entropy_names(), code_S))
    found.append(_of_names("class", steps["class"]))
    number_S = steps.groupby("sequence_id", observed=True, sort=False).cumcount().to_numpy() + 1
    found.append(_of_powers(number_S))
    if steps["regime"].notna().any():
        found.append(_of_regimes(steps["regime"].to_numpy(np.float64)))
    return found


def _of_names(name: str, values: pd.Series[str]) -> Grouping:
    groups, code_S = np.unique(values.astype(str).to_numpy(object), return_inverse=True)
    return Grouping(name, tuple(groups), code_S)


def _of_powers(number_S: np.ndarray) -> Grouping:
    """Return steps 1, 2, 3-4, 5-8 ...: the code is the number of bits of what precedes a step."""
    code_S = np.frexp(number_S - 1)[1].astype(np.int64)
    last = int(code_S.max(initial=0))
    names = ["1", "2", *(f"{2 ** (bit - 1) + 1}-{2**bit}" for bit in range(2, last + 1))]
    return Grouping("position", tuple(names[: last + 1]), code_S)


def _of_regimes(regime_S: np.ndarray) -> Grouping:
    numbers, code_S = np.unique(regime_S, return_inverse=True)
    code_S = np.where(np.isnan(regime_S), -1, code_S)
    names = tuple(f"{number:.0f}" for number in numbers[~np.isnan(numbers)])
    return Grouping("regime", names, code_S)
