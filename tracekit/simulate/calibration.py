"""How far levels predicted and local can be trusted: cell by cell against level propagated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES
from tracekit.measure.weighted import line, median, median_factor, pearson, quotient, spearman
from tracekit.simulate.calibration_cells import ESTIMATES, calibration_cells, counted_cells
from tracekit.simulate.pairs import Pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd
    from numpy.typing import ArrayLike

RESAMPLES = 1000
"""Draws of the bootstrap."""

MOST_NUMBERS = 1 << 22
"""Weights that are held at once: draws times cells."""

MIN_CELLS = 3
"""Fewer cells of a sequence have no rank correlation of their own."""

KL_ENDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper ends (exclusive) of the buckets of the predicted KL, nats a token."""


@dataclass(frozen=True)
class PowerLaw:
    """log(propagated KL) = a + b log(predicted KL), KL in nats a token."""

    a: float
    b: float

    def corrected(self, kl_predicted: ArrayLike) -> np.ndarray:
        """Return predictions after the law, float64 of the same shape; NaN stays NaN."""
        with np.errstate(divide="ignore"):
            made: np.ndarray = np.exp(self.a + self.b * np.log(np.asarray(kl_predicted, float)))
        return made


@dataclass(frozen=True)
class Calibration:
    """The columns of ``schema.CALIBRATION``, and the law; None where no rising one can be had."""

    columns: dict[str, list[Any]]
    law: PowerLaw | None


def calibration(kv: pd.DataFrame, *, seed: int) -> Calibration:
    """Hold predicted KL and local error against propagated KL.

    Whole sequences are resampled for the intervals, at fixed laws for the error on left-out ones:
    each sequence is corrected by the law fitted on all others. A pair is two policies of the same
    ``target_frac`` on one sequence.

    Parameters
    ----------
    kv
        Rows of ``schema.KV_RESULTS``.
    seed
        Of the bootstrap.

    Returns
    -------
    Calibration
        No rows where no cell has all three levels. Bounds and idle policies are counted apart;
        logarithms are of cells whose propagated KL is above the noise floor, and of no others.
    """
    cells = calibration_cells(kv)
    counted = counted_cells(cells)
    rows = list(_counts(cells))
    for level, name in ESTIMATES.items():
        rows += [row | {"level": level} for row in _agreement(counted, name, seed)]
    logged = counted[counted["has_log"]]
    rows += [row | {"level": "predicted"} for row in _size(logged, seed)]
    names = [column.name for column in schema.CALIBRATION.columns]
    columns = {name: [row.get(name) for row in rows if len(cells)] for name in names}
    enough = len(logged) >= schema.ENOUGH_CELLS
    law = fit(logged["kl_predicted_nats"], logged["kl_nats"]) if enough else None
    return Calibration(columns, law)


def fit(kl_predicted: ArrayLike, kl_propagated: ArrayLike) -> PowerLaw | None:
    """Return the law by least squares on logarithms of N cells; None where none rises."""
    x_N, y_N = (np.log(np.asarray(one, np.float64)) for one in (kl_predicted, kl_propagated))
    (a,), (b,) = line(x_N, y_N, np.ones((1, len(x_N))))
    return PowerLaw(float(a), float(b)) if b > 0 else None


def _counts(cells: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield how many cells there are, and how many are left out of what."""
    counted = counted_cells(cells)
    groups = {
        "all": counted,
        "bound": cells[cells["is_bound"]],
        "idle": cells[cells["is_idle"] & ~cells["is_bound"]],
        "no logarithm": counted[~counted["has_log"]],
    }
    for group, part in groups.items():
        yield {
            "statistic": "cells",
            "group": group,
            "value": float(len(part)),
            "num_cells": len(part),
            "num_sequences": part["sequence_id"].nunique(),
        }


def _agreement(cells: pd.DataFrame, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield how well one estimate orders the cells, and how straight it is on logarithms."""
    sequence_N, x_N, y_N = (cells[one].to_numpy() for one in ("sequence_id", name, "kl_nats"))
    yield _row("spearman", "all", sequence_N, partial(spearman, x_N, y_N), seed)
    yield from _within(cells, name, seed)
    has_log = cells["has_log"].to_numpy(dtype=bool) & (x_N > 0)
    logs = (np.log(one[has_log]) for one in (x_N, y_N))
    yield _row("log_pearson", "all", sequence_N[has_log], partial(pearson, *logs), seed)
    yield from _ordered(cells, name, seed)


def _within(cells: pd.DataFrame, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the mean over sequences of the rank correlation within each, and the lowest."""
    found: dict[str, tuple[float, int]] = {}
    for one, part in cells.groupby("sequence_id"):
        rho = spearman(part[name].to_numpy(), part["kl_nats"].to_numpy(), np.ones((1, len(part))))
        if len(part) >= MIN_CELLS and not np.isnan(rho[0]):
            found[str(one)] = float(rho[0]), len(part)
    rho_S = np.array([rho for rho, _ in found.values()])
    row = _row("spearman_within", "mean", list(found), partial(quotient, rho_S, 1.0), seed)
    yield row | {"num_cells": sum(count for _, count in found.values())}
    if found:
        lowest = min(found, key=lambda one: found[one])
        value, count = found[lowest]
        yield {
            "statistic": "spearman_lowest",
            "group": lowest,
            "value": value,
            "num_cells": count,
            "num_sequences": 1,
        }


def _ordered(cells: pd.DataFrame, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the share of pairs that are ordered rightly, and how many pairs are of each kind."""
    pairs = [
        Pairs.of(str(group[0]), part[name], part["kl_nats"], part["noise_kl_nats"])
        for group, part in cells.groupby(["sequence_id", "target_frac"])
    ]
    used = [one for one in pairs if one.num_counted]
    right_P, counted_P = (
        np.array([getattr(one, field) for one in used], np.float64)
        for field in ("num_right", "num_counted")
    )
    share = partial(quotient, right_P, counted_P)
    row = _row("pairs_ordered", "all", [one.sequence_id for one in used], share, seed)
    row["num_cells"] = sum(one.num_cells for one in used)
    yield row
    kinds = {
        "all": sum(one.num_counted for one in pairs),
        "tied": sum(one.num_tied for one in pairs),
        "near noise": sum(one.num_near for one in pairs),
    }
    for group, count in kinds.items():
        yield row | {
            "statistic": "pairs",
            "group": group,
            "value": count,
            "low": None,
            "high": None,
        }


def _size(cells: pd.DataFrame, seed: int) -> Iterator[dict[str, Any]]:
    """Yield by how much predictions of cells that have a logarithm run low, and what a law mends."""
    sequence_N = cells["sequence_id"].to_numpy()
    predicted_N, kl_N = (cells[name].to_numpy() for name in ("kl_predicted_nats", "kl_nats"))
    times_N, bucket_N = kl_N / predicted_N, np.digitize(predicted_N, KL_ENDS)
    name = "propagated_over_predicted"
    yield _row(name, "all", sequence_N, partial(median, times_N), seed)
    for bucket in np.unique(bucket_N):
        of = bucket_N == bucket
        yield _row(name, _bucket(bucket), sequence_N[of], partial(median, times_N[of]), seed)
    x_N, y_N = np.log(predicted_N), np.log(kl_N)
    yield _row("power_law_a", "all", sequence_N, lambda w_RN: line(x_N, y_N, w_RN)[0], seed)
    yield _row("power_law_b", "all", sequence_N, lambda w_RN: line(x_N, y_N, w_RN)[1], seed)
    corrected_N = _left_out(x_N, y_N, sequence_N)
    there = ~np.isnan(corrected_N)
    for group, told_N in (("as predicted", x_N), ("corrected", corrected_N)):
        factor = partial(median_factor, np.abs(y_N - told_N)[there])
        yield _row("left_out_factor", group, sequence_N[there], factor, seed)


def _bucket(number: int) -> str:
    """Return the name of a bucket of the predicted KL."""
    if number == 0:
        return f"< {KL_ENDS[0]:g}"
    if number == len(KL_ENDS):
        return f">= {KL_ENDS[-1]:g}"
    return f"{KL_ENDS[number - 1]:g} - {KL_ENDS[number]:g}"


def _left_out(x_N: np.ndarray, y_N: np.ndarray, sequence_N: np.ndarray) -> np.ndarray:
    """Return each cell's logarithm by the law of all other sequences; NaN where they have none."""
    names, code_N = np.unique(sequence_N.astype(str), return_inverse=True)
    a_S, b_S = line(x_N, y_N, (1 - np.eye(len(names)))[:, code_N])
    told_N: np.ndarray = a_S[code_N] + b_S[code_N] * x_N
    return told_N


def _row(
    statistic: str,
    group: str,
    sequence_N: ArrayLike,
    compute: Callable[[np.ndarray], np.ndarray],
    seed: int,
) -> dict[str, Any]:
    """Return a statistic of N cells with its bootstrap interval over their sequences.

    ``compute`` takes weights [R, N], whole numbers, and returns R values: the first of all cells
    alike, the others of resamples. A resample without a value (NaN) is left out.
    """
    names, code_N = np.unique(np.asarray(sequence_N, dtype=str), return_inverse=True)
    row = {
        "statistic": statistic,
        "group": group,
        "num_cells": len(code_N),
        "num_sequences": len(names),
    }
    if not len(names):
        return row
    num = len(names)
    drawn_RS = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), RESAMPLES)
    weight_RS = np.vstack([np.ones(num), drawn_RS])
    blocks = np.array_split(weight_RS, -(-weight_RS.shape[0] * len(code_N) // MOST_NUMBERS))
    value_R = np.concatenate([compute(block[:, code_N]) for block in blocks])
    if np.isnan(value_R[0]):
        return row
    row["value"] = float(value_R[0])
    if num >= MIN_SEQUENCES:
        drawn = value_R[1:][~np.isnan(value_R[1:])]
        low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")
        row |= {"low": float(low), "high": float(high)}
    return row
