"""Calibration: how far levels predicted and local can be trusted, cell by cell against propagated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tracekit import schema
from tracekit.measure.stats import MIN_SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

ESTIMATES = {"predicted": "kl_predicted_nats", "local": "output_error"}
"""By level, the column that is held against the propagated KL."""

_FLAT = 1e-20  # A variance below this share of the weight is rounding.


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
    """The columns of ``schema.CALIBRATION``, and the law; None where no rising one can be fitted."""

    columns: dict[str, list[Any]]
    law: PowerLaw | None


def choose_calibrated(sequences: pd.DataFrame, count: int, seed: int) -> tuple[str, ...]:
    """Return sequences with influence probes, drawn by seed and spread evenly over domains.

    Parameters
    ----------
    sequences
        Rows of ``schema.SEQUENCES``.
    count
        Sequences wanted; where there are fewer, all of them are returned.
    seed
        Of the draw.

    Returns
    -------
    tuple
        Their ids, in the order of the trace. No domain has two more than another that has any left.
    """
    there = sequences[sequences["probed_from"].notna()]
    drawn = there.iloc[np.random.default_rng(seed).permutation(len(there))]
    # The first sequence drawn of each domain, then the second of each ...
    turn = drawn.groupby("domain", observed=True, dropna=False).cumcount().to_numpy()
    picked = set(drawn["sequence_id"].iloc[np.argsort(turn, kind="stable")[:count]])
    return tuple(str(name) for name in there["sequence_id"] if name in picked)


def calibration_cells(kv: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that have all three levels: a policy on a sequence.

    Parameters
    ----------
    kv
        Rows of ``schema.KV_RESULTS``; those of all layers and all steps together are used.

    Returns
    -------
    pandas.DataFrame
        One row a cell, sorted: ``sequence_id``, ``policy``, ``family``, ``target_frac``,
        ``is_bound`` (looks at later rows), ``is_idle``, ``kl_nats``, ``noise_kl_nats``,
        ``kl_predicted_nats``, ``output_error`` (float64), ``has_log`` (the propagated KL is above
        the noise floor, the prediction above 0).
    """
    of_all = (kv["layer"] == schema.ALL) & (kv["kv_head"] == schema.ALL)
    whole = kv[of_all & (kv["steps"] == schema.ANY)].astype({"sequence_id": str, "policy": str})
    own = ["family", "target_frac", "causal", "is_idle", "kl_nats", "noise_kl_nats"]
    names = {"propagated": own} | {level: [name] for level, name in ESTIMATES.items()}
    parts = [
        whole[whole["level"] == level].set_index(["sequence_id", "policy"])[columns]
        for level, columns in names.items()
    ]
    cells = parts[0].join(parts[1:], how="inner").sort_index().reset_index()
    numbers = ["kl_nats", "noise_kl_nats", *ESTIMATES.values()]
    cells = cells.astype({**dict.fromkeys(numbers, np.float64), "causal": bool, "is_idle": bool})
    cells = cells.dropna(subset=["kl_nats", *ESTIMATES.values()]).fillna({"noise_kl_nats": 0.0})
    cells["is_bound"] = ~cells.pop("causal")
    above = cells["kl_nats"] > cells["noise_kl_nats"]
    cells["has_log"] = above & (cells["kl_predicted_nats"] > 0)
    return cells.reset_index(drop=True)


def counted_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that are evidence: bounds that look ahead and idle policies are none."""
    return cells[~cells["is_bound"] & ~cells["is_idle"]]


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
    return Calibration(columns, fit(logged["kl_predicted_nats"], logged["kl_nats"]))


def fit(kl_predicted: ArrayLike, kl_propagated: ArrayLike) -> PowerLaw | None:
    """Return the law by least squares on logarithms of N cells; None unless it can be, and rises."""
    x_N, y_N = (np.log(np.asarray(one, np.float64)) for one in (kl_predicted, kl_propagated))
    line = _lines(x_N, y_N, np.ones((1, len(x_N))))
    return PowerLaw(float(line.a_R[0]), float(line.b_R[0])) if line.b_R[0] > 0 else None


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
    sequence_N, x_N = cells["sequence_id"].to_numpy(), cells[name].to_numpy()
    y_N = cells["kl_nats"].to_numpy()
    yield _row("spearman", "all", sequence_N, partial(_spearman, x_N, y_N), seed)
    alone = {
        str(one): float(_spearman(part[name], part["kl_nats"], np.ones((1, len(part))))[0])
        for one, part in cells.groupby("sequence_id")
        if len(part) >= MIN_CELLS
    }
    there = {one: value for one, value in alone.items() if not np.isnan(value)}
    within_S = np.array(list(there.values()))
    among = cells[cells["sequence_id"].isin(there)]
    mean = partial(_share, within_S, np.ones(len(within_S)))
    yield _row("spearman_within", "mean", list(there), mean, seed) | {"num_cells": len(among)}
    if there:
        lowest = min(there, key=lambda one: (there[one], one))
        of_lowest = cells[cells["sequence_id"] == lowest]["sequence_id"].to_numpy()
        value = partial(np.full, 1, there[lowest])
        yield _row("spearman_lowest", lowest, of_lowest, lambda _: value(), seed)
    has_log = (cells["has_log"] & (cells[name] > 0)).to_numpy()
    logs = (np.log(one[has_log]) for one in (x_N, y_N))
    yield _row("log_pearson", "all", sequence_N[has_log], partial(_pearson, *logs), seed)
    pairs = _pairs(cells, name)
    right_S, counted_S = (pairs[one].to_numpy(np.float64) for one in ("right", "all"))
    has_pairs = counted_S > 0
    share = partial(_share, right_S[has_pairs], counted_S[has_pairs])
    row = _row("pairs_ordered", "all", pairs.index[has_pairs], share, seed)
    shared = {name: row["num_sequences"] for name in ("num_sequences",)}
    row["num_cells"] = int(pairs["cells"].sum())
    yield row
    for group in ("all", "tied", "near noise"):
        value_ = float(pairs[group].sum())
        yield {"statistic": "pairs", "group": group, "value": value_} | shared
