"""What candidate sets of many schemes and sizes did at the same scored steps, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracekit.simulate.step_groups import Grouping

CELL = ("estimator", "controller", "fit", "size")
"""What tells one kind of set from another."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tries:
    """Rows of ``schema.CANDIDATES`` with their cells and steps by number, X of them.

    Parameters
    ----------
    cells
        Columns ``CELL``, a row each of C cells, in the order of the rows.
    steps
        Rows of ``schema.SCORED``, S of them, by sequence and position.
    sequences
        Names of the N sequences.
    sequence_S
        Sequence of each step.
    cell_X, step_X
        Cell and step of each row; rows are sorted by them.
    columns
        The other columns, [X] each.
    """

    cells: pd.DataFrame
    steps: pd.DataFrame
    sequences: tuple[str, ...]
    sequence_S: np.ndarray
    cell_X: np.ndarray
    step_X: np.ndarray
    columns: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, candidates: pd.DataFrame, scored: pd.DataFrame) -> Tries:
        """Return rows in order; those of steps that are not known are left out.

        Parameters
        ----------
        candidates
            Rows of ``schema.CANDIDATES``, in any order.
        scored
            Rows of ``schema.SCORED``, in any order.
        """
        names = tuple(sorted(map(str, scored["sequence_id"].unique())))
        number_S = numbers(scored["sequence_id"], names)
        order_S = np.lexsort((scored["position"].to_numpy(), number_S))
        steps, sequence_S = scored.iloc[order_S].reset_index(drop=True), number_S[order_S]
        number_X = numbers(candidates["sequence_id"], names)
        width = 1 + max(int(one["position"].max()) for one in (scored, candidates) if len(one) > 0)
        key_S = sequence_S * width + steps["position"].to_numpy()
        key_X = number_X * width + candidates["position"].to_numpy()
        step_X = np.searchsorted(key_S, key_X).clip(max=len(key_S) - 1)
        code_X, first_C = _cells(candidates)
        kept = np.flatnonzero((number_X >= 0) & (key_S[step_X] == key_X))
        order_X = kept[np.lexsort((step_X[kept], code_X[kept]))]
        cells = candidates.iloc[first_C][list(CELL)].reset_index(drop=True)
        texts = dict.fromkeys(CELL[:-1], object)
        others = [
            one for one in candidates.columns if one not in (*CELL, "sequence_id", "position")
        ]
        return cls(
            cells=cells.astype(texts),
            steps=steps,
            sequences=names,
            sequence_S=sequence_S,
            cell_X=code_X[order_X],
            step_X=step_X[order_X],
            columns={name: candidates[name].to_numpy()[order_X] for name in others},
        )

    @cached_property
    def sequence_X(self) -> np.ndarray:
        """Sequence of each row."""
        found: np.ndarray = self.sequence_S[self.step_X]
        return found

    def sums(self, grouping: Grouping, values_X: np.ndarray) -> np.ndarray:
        """Return sums of a number over the steps of each cell, group and sequence, [C, G, N]."""
        shape = (len(self.cells), len(grouping.groups), len(self.sequences))
        group_X = grouping.code_S[self.step_X]
        there = group_X >= 0
        flat = (self.cell_X * shape[1] + group_X) * shape[2] + self.sequence_X
        weights = np.asarray(values_X, dtype=np.float64)[there]
        return np.bincount(flat[there], weights, minlength=int(np.prod(shape))).reshape(shape)

    def of_sequences(self, rows: pd.DataFrame, column: str) -> np.ndarray:
        """Return a column of rows of ``schema.VOCAB_RESULTS``, [C, N]; 0 where there is no row."""
        place = {tuple(cell): number for number, cell in enumerate(self.cells.to_numpy().tolist())}
        found_CN = np.zeros((len(self.cells), len(self.sequences)))
        cells = zip(*(rows[name].tolist() for name in CELL), strict=True)
        cell_Y = np.array([place.get(tuple(cell), -1) for cell in cells], dtype=np.int64)
        sequence_Y = numbers(rows["sequence_id"], self.sequences)
        there = (cell_Y >= 0) & (sequence_Y >= 0)
        values = rows[column].to_numpy(np.float64)
        found_CN[cell_Y[there], sequence_Y[there]] = values[there]
        return found_CN


def numbers(values: pd.Series[Any], names: tuple[str, ...]) -> np.ndarray:
    """Return the place of each value among names, int64; -1 where it is none of them."""
    place = {name: number for number, name in enumerate(names)}
    code_X, distinct = pd.factorize(values)
    found = np.array([place.get(str(one), -1) for one in distinct], dtype=np.int64)
    named: np.ndarray = found[code_X] if len(found) else np.zeros(len(values), dtype=np.int64) - 1
    return named


def _cells(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the cell of each row, in the order in which cells appear, and the first row of each."""
    code_X = np.zeros(len(rows), dtype=np.int64)
    for name in CELL:
        part_X, distinct = pd.factorize(rows[name])
        code_X = code_X * max(len(distinct), 1) + part_X
    found_X, _ = pd.factorize(code_X)
    _, first_C = np.unique(found_X, return_index=True)
    return found_X, first_C
