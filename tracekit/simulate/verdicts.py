"""Which estimator keeps the most likely token in which domain, or that none does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.simulate.quotients import quotients
from tracekit.simulate.step_groups import OF_SEQUENCES, step_groups
from tracekit.simulate.tries import CELL
from tracekit.vocab.budget import ASKED, OTHERS
from tracekit.vocab.scheme import parse_scheme

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from tracekit.simulate.tries import Tries

LEVELS = (0.99, 0.999)
"""Shares of steps whose most likely token is to be a candidate."""

VERDICT_SEQUENCES = 8
"""Fewer sequences of a domain have no verdict."""

KEPT, UNSUITED = "kept", "not suitable"
FEW_SEQUENCES, FEW_STEPS = "too few sequences", "not enough steps"
NOTHING = "nothing to judge"


_MEASURED = ("hit_argmax", "low", "high", "n", "num_steps", "cost_frac", "set_size_mean")


@dataclass(frozen=True, eq=False)
class _Domain:
    """What the cells that a decoder could run did in one domain, arrays [C]."""

    name: str
    cells: pd.DataFrame
    hit_argmax: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray
    num_steps: np.ndarray
    cost_frac: np.ndarray
    set_size_mean: np.ndarray


def steps_needed(level: float) -> int:
    """Return the steps without a miss after which a level is shown: the rule of three.

    With none missed of n the upper end of the 95 % interval of the missed share is about 3 / n.
    """
    return math.ceil(round(3 / (1 - level), 6))


def verdicts(tries: Tries, vocab: pd.DataFrame, *, seed: int) -> dict[str, Any]:
    """Return the columns of ``schema.VERDICTS``.

    Parameters
    ----------
    tries
        All sets.
    vocab
        Rows of ``schema.VOCAB_RESULTS``, for costs.
    seed
        Of the resampling of sequences.

    Returns
    -------
    dict
        All domains together, then each, at 99 % and 99.9 %. A set keeps a level if the lower end of
        the interval of its hits over sequences is there; the cheapest that does is named, of those
        that read less than the full head. Else the best that there is. Bounds that no decoder
        reaches, and sizes fitted on the sequence itself, are never named. Below 8 sequences, and
        below the steps that the level takes, there is no verdict.

    Notes
    -----
    The cheapest of many is named on the sequences that judge it: near the level it was lucky more
    often than not. Certify it on other prompts.
    """
    rows = [_verdict(domain, level) for domain in _domains(tries, vocab, seed) for level in LEVELS]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _domains(tries: Tries, vocab: pd.DataFrame, seed: int) -> Iterator[_Domain]:
    """Yield all steps, then those of each domain."""
    cells = tries.cells
    causal = {one: parse_scheme(one).estimator.causal for one in cells["estimator"].unique()}
    named_C = (
        cells["estimator"].map(causal).to_numpy(dtype=bool)
        & cells["fit"].isin([ASKED, OTHERS]).to_numpy()
    )
    hits_X, costs_CN = tries.columns["hit_argmax"], tries.of_sequences(vocab, "cost_frac")
    for grouping in step_groups(tries.steps):
        if grouping.name not in OF_SEQUENCES:
            continue
        steps_CGN = tries.sums(grouping, np.ones(len(tries.cell_X)))
        found = quotients(tries.sums(grouping, hits_X), steps_CGN, seed=seed)
        num_CG = steps_CGN.sum(-1)
        with np.errstate(invalid="ignore"):  # cells that were not tried in a domain
            cost_CG = (steps_CGN * costs_CN[:, None]).sum(-1) / num_CG
            size_CG = tries.sums(grouping, tries.columns["set_size"]).sum(-1) / num_CG
        for group, name in enumerate(grouping.groups):
            chosen = named_C & (num_CG[:, group] > 0)
            values = (found.value, found.low, found.high, found.n, num_CG, cost_CG, size_CG)
            yield _Domain(name, cells[chosen], *(one[chosen, group] for one in values))


def _verdict(domain: _Domain, level: float) -> dict[str, Any]:
    """Return the verdict on a domain."""
    needed = steps_needed(level)
    shared = {"domain": domain.name, "hit_level": level, "steps_needed": needed}
    if not len(domain.cells):
        none = dict.fromkeys((*CELL, *_MEASURED))
        why = f"{NOTHING}: no estimator that a decoder could run was tried"
        return shared | none | {"verdict": NOTHING, "why": why}
    most_n, most_steps = int(domain.n.max()), int(domain.num_steps.max())
    place = _best(domain)
    if most_n < VERDICT_SEQUENCES:
        verdict, why = FEW_SEQUENCES, f"n = {most_n}, {VERDICT_SEQUENCES} needed"
    elif most_steps < needed:
        verdict, why = FEW_STEPS, f"{most_steps}, {needed} without a miss needed"
    elif (kept := _cheapest(domain, level)) is not None:
        place, verdict = kept, KEPT
        why = f"the lower end of the interval is at or above {level:g}"
    else:
        verdict = UNSUITED
        why = f"nothing that reads less than the full head keeps {100 * level:g} %"
    return shared | _row(domain, place) | {"verdict": verdict, "why": f"{verdict}: {why}"}


def _row(domain: _Domain, place: int) -> dict[str, Any]:
    """Return one cell of a domain; no interval is null."""
    cell = domain.cells.iloc[place]
    values = {name: getattr(domain, name)[place].item() for name in _MEASURED}
    return {name: cell[name] for name in CELL} | values


def _cheapest(domain: _Domain, level: float) -> int | None:
    """Return the cheapest cell that keeps a level, of equal ones the smallest size; None if none."""
    judged = (domain.n >= VERDICT_SEQUENCES) & (domain.num_steps >= steps_needed(level))
    able = np.flatnonzero(judged & (domain.low >= level) & (domain.cost_frac < 1))
    if not len(able):
        return None
    size = domain.cells["size"].to_numpy()
    return int(able[np.lexsort((size[able], domain.cost_frac[able]))[0]])


def _best(domain: _Domain) -> int:
    """Return the cell with the most hits of those that read less than the full head, if there are."""
    cheap = domain.cost_frac < 1
    able = np.flatnonzero(cheap if cheap.any() else np.ones_like(cheap))
    return int(able[np.lexsort((domain.cost_frac[able], -domain.hit_argmax[able]))[0]])
