"""Key tokens that candidate sets left out: which, where, and of what class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.simulate.step_groups import Grouping
from tracekit.simulate.tries import CELL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracekit.simulate.tries import Tries

SHOWN_MISSES = 20
"""Misses that are listed of a scheme and size."""

CONTEXT_TOKENS = 12
"""Tokens before a miss that are shown."""


def misses(tries: Tries, token_ids: Mapping[str, np.ndarray], texts: np.ndarray) -> dict[str, Any]:
    """Return the columns of ``schema.MISSES``: the surest steps whose likeliest token was no candidate.

    Parameters
    ----------
    tries
        All sets.
    token_ids
        Tokens of each sequence, from position 0.
    texts
        Readable text by token id; rows of the head that no token has are named by their number.

    Returns
    -------
    dict
        Cells in order, the highest probability first; ties by sequence and position.
    """
    missed_X = np.flatnonzero(~tries.columns["hit_argmax"].astype(bool))
    cell_X, step_X = tries.cell_X[missed_X], tries.step_X[missed_X]
    prob_X = tries.steps["best_prob"].to_numpy(np.float64)[step_X]
    order = np.lexsort((step_X, -prob_X, cell_X))
    cell_X, step_X = cell_X[order], step_X[order]
    count_C = np.bincount(cell_X, minlength=len(tries.cells))
    place_X = np.arange(len(cell_X)) - (np.cumsum(count_C) - count_C)[cell_X]
    listed = place_X < SHOWN_MISSES
    cell_X, step_X, place_X = cell_X[listed], step_X[listed], place_X[listed]
    steps = tries.steps.iloc[step_X]
    found: dict[str, Any] = {name: tries.cells[name].to_numpy()[cell_X] for name in CELL}
    found |= {"place": place_X + 1, "num_misses": count_C[cell_X]}
    for name in ("sequence_id", "domain", "position", "best_id", "best_prob", "token_id"):
        found[name] = steps[name].to_numpy()
    found |= {
        "entropy_nats": steps["entropy_nats"].to_numpy(),
        "class": _texts(steps["best_class"]),
    }
    found |= {
        "text": [_text(texts, one) for one in found["best_id"]],
        "token_text": [_text(texts, one) for one in found["token_id"]],
        "context": [
            "".join(_text(texts, one) for one in _before(token_ids[str(name)], int(position)))
            for name, position in zip(found["sequence_id"], found["position"], strict=True)
        ],
    }
    return found


def miss_classes(tries: Tries) -> dict[str, Any]:
    """Return the columns of ``schema.MISS_CLASSES``: misses by class of the likeliest token.

    Parameters
    ----------
    tries
        All sets.

    Returns
    -------
    dict
        Cells in order, classes by name; those of which a cell has a step.
    """
    groups, code_S = np.unique(_texts(tries.steps["best_class"]), return_inverse=True)
    classes = Grouping("best_class", tuple(groups), code_S)
    steps_CG = tries.sums(classes, np.ones(len(tries.cell_X))).sum(-1)
    missed_CG = tries.sums(classes, ~tries.columns["hit_argmax"].astype(bool)).sum(-1)
    with np.errstate(invalid="ignore"):  # where nothing was missed
        miss_share_CG = missed_CG / missed_CG.sum(1, keepdims=True)
    step_share_CG = steps_CG / steps_CG.sum(1, keepdims=True)
    cell, group = np.nonzero(steps_CG)
    found: dict[str, Any] = {name: tries.cells[name].to_numpy()[cell] for name in CELL}
    return found | {
        "class": np.array(groups, dtype=object)[group],
        "num_misses": missed_CG[cell, group].astype(np.int64),
        "num_steps": steps_CG[cell, group].astype(np.int64),
        "miss_share": miss_share_CG[cell, group],
        "step_share": step_share_CG[cell, group],
        "lift": miss_share_CG[cell, group] / step_share_CG[cell, group],
    }


def _before(ids_T: np.ndarray, position: int) -> np.ndarray:
    return ids_T[max(position - CONTEXT_TOKENS, 0) : position]


def _text(texts: np.ndarray, token_id: int) -> str:
    return str(texts[token_id]) if token_id < len(texts) else f"<row {token_id}>"


def _texts(values: Any) -> np.ndarray:
    found: np.ndarray = values.astype(str).to_numpy(object)
    return found
