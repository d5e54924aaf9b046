"""What candidate sets cost in a batch: the head's rows that any of its requests needs."""

from __future__ import annotations

from itertools import combinations, islice, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tracekit.simulate.tries import CELL

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHES = (1, 2, 4, 8, 16, 32)
"""Requests that are decoded together."""

DRAWS = 64
"""Batches that are drawn where there are more."""

_STEP = ["estimator", "controller", "sequence_id", "position"]


def batch_unions(
    sets: pd.DataFrame,
    candidates: pd.DataFrame,
    vocab: pd.DataFrame,
    *,
    num_pinned: int,
    num_rows: int,
    seed: int,
) -> dict[str, Any]:
    """Return the columns of ``schema.BATCH_UNIONS``.

    Parameters
    ----------
    sets
        Rows of ``schema.CANDIDATE_SETS``: a few steps of each sequence.
    candidates
        Rows of ``schema.CANDIDATES``, which tell how much of a ranking is in a set.
    vocab
        Rows of ``schema.VOCAB_RESULTS``, for what an estimator costs by itself.
    num_pinned
        Tokens that are in every set.
    num_rows
        V.
    seed
        Of the draws: cells that were tried on the same steps see the same batches.

    Returns
    -------
    dict
        By cell and batch. A batch holds different sequences, one of the steps of each; means are
        over 64 of them, or over all that there are. An estimator's own bytes count once a batch, its
        own multiply-adds once a request. A step at which the full head was run has all V tokens.
    """
    sampled = sets.drop_duplicates(_STEP)  # fits share their rankings
    tried = candidates[[*_STEP, "fit", "size", "set_size"]].merge(sampled, on=_STEP)
    costs = _own_costs(vocab, num_rows)
    drawn: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
    rows: list[dict[str, Any]] = []
    for cell, part in tried.groupby(list(CELL), observed=True, sort=False):
        # By name: draws do not hang on the order of rows.
        part = part.assign(sequence_id=part["sequence_id"].astype(str)).sort_values(_STEP[2:])
        sequence_Q = pd.factorize(part["sequence_id"])[0]
        key = tuple(sequence_Q.tolist())
        if key not in drawn:
            drawn[key] = _draws(sequence_Q, seed)
        size_Q, is_whole_Q = part["set_size"].to_numpy(), part["set_size"].to_numpy() >= num_rows
        packed_QW = _packed(part["ids"].tolist(), size_Q - num_pinned, num_rows)
        own_bytes, own_macs = costs[cell]
        for batch, draw_DB in drawn[key].items():
            union_D = num_pinned + _united(packed_QW, draw_DB)
            union_D = np.where(is_whole_Q[draw_DB].any(1), num_rows, union_D)
            union_frac = float(union_D.mean()) / num_rows
            rows.append(
                dict(zip(CELL, cell, strict=True))
                | {
                    "batch": batch,
                    "num_draws": len(draw_DB),
                    "n": int(sequence_Q.max()) + 1,
                    "union_size": float(union_D.mean()),
                    "union_frac": union_frac,
                    "cost_frac": union_frac + own_bytes,
                    "macs_own_frac": float(size_Q[draw_DB].mean()) / num_rows + own_macs,
                    "macs_union_frac": union_frac + own_macs,
                }
            )
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _own_costs(vocab: pd.DataFrame, num_rows: int) -> dict[Any, tuple[float, float]]:
    """Return bytes and multiply-adds of each cell beside its rows, over the head's: means."""
    rows_frac = vocab["set_size_mean"].astype(np.float64) / num_rows
    own = vocab[list(CELL)].assign(
        **{name: vocab[name].astype(np.float64) - rows_frac for name in ("cost_frac", "macs_frac")}
    )
    means = own.groupby(list(CELL), observed=True, sort=False).mean().clip(lower=0)
    return {cell: (float(one), float(two)) for cell, one, two in means.itertuples(name=None)}


def _draws(sequence_Q: np.ndarray, seed: int) -> dict[int, np.ndarray]:
    """Return batches of each number of requests that there are sequences for, int64 [D, B]."""
    steps = [np.flatnonzero(sequence_Q == one).tolist() for one in range(sequence_Q.max() + 1)]
    return {batch: _batches(steps, batch, seed) for batch in BATCHES if batch <= len(steps)}


def _batches(steps: Sequence[Sequence[int]], batch: int, seed: int) -> np.ndarray:
    """Return all batches if they are few, else some drawn ones."""
    every = (one for chosen in combinations(steps, batch) for one in product(*chosen))
    first = list(islice(every, DRAWS + 1))
    if len(first) <= DRAWS:
        return np.array(first)
    random = np.random.default_rng([seed, batch])
    sequence_DB = random.random((DRAWS, len(steps))).argsort(1)[:, :batch]
    count_DB = np.array([len(one) for one in steps])[sequence_DB]
    pick_DB = random.integers(count_DB)
    pairs = zip(sequence_DB.ravel().tolist(), pick_DB.ravel().tolist(), strict=True)
    return np.array([steps[one][pick] for one, pick in pairs]).reshape(DRAWS, batch)


def _packed(ids: Sequence[np.ndarray], count_Q: np.ndarray, num_rows: int) -> np.ndarray:
    """Return which tokens the first of each ranking are, a bit a token, uint8 [Q, V / 8]."""
    is_in_QV = np.zeros((len(ids), num_rows), dtype=bool)
    for in_V, ids_K, count in zip(is_in_QV, ids, count_Q.tolist(), strict=True):
        in_V[ids_K[:count]] = True
    return np.packbits(is_in_QV, axis=1)


def _united(packed_QW: np.ndarray, draw_DB: np.ndarray) -> np.ndarray:
    """Return the tokens of each batch's union, int64 [D]."""
    union_DW = np.bitwise_or.reduce(packed_QW[draw_DB], axis=1)
    found: np.ndarray = np.bitwise_count(union_DW).sum(1, dtype=np.int64)
    return found
