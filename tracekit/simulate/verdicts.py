"""Which estimator keeps the most likely token in which domain: chosen on one half, judged on another."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
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

HALF_SEQUENCES = 4
"""Fewer sequences of a domain in a half, of 8 in all, have no verdict."""

KEPT, UNKEPT, UNSUITED = "kept", "not kept on the other half", "not suitable"
FEW_SEQUENCES, FEW_STEPS = "too few sequences", "not enough steps"
NOTHING = "nothing to judge"

_OF_CHOOSING = {"n_choosing": "n", "hit_choosing": "hit_argmax", "low_choosing": "low"}
"""Columns that say what the half that chose saw."""


@dataclass(frozen=True, eq=False)
class _Half:
    """What the cells did on one half of the sequences of a domain, arrays [C]."""

    hit_argmax: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray
    num_steps: np.ndarray
    cost_frac: np.ndarray
    set_size_mean: np.ndarray

    def keeps(self, level: float) -> np.ndarray:
        """Return which cells keep a level and read less than the full head, bool [C]."""
        return (self.low >= level) & (self.cost_frac < 1)


_MEASURED = tuple(field.name for field in fields(_Half))


@dataclass(frozen=True, eq=False)
class _Domain:
    """The cells that a decoder could run, C of them, on both halves of one domain."""

    name: str
    cells: pd.DataFrame
    choosing: _Half
    judging: _Half


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
        Rows of ``schema.VOCAB_RESULTS``, for costs; their order is that of the sequences.
    seed
        Of the resampling of sequences.

    Returns
    -------
    dict
        All domains together, then each, at 99 % and 99.9 %. In each domain the prompts go to two
        halves in turn, with all their samples: the first, third ... choose, the others judge. A set
        keeps a level on a half if the lower end of the interval of its hits there is at or above
        it, and it reads less than the full head. The cheapest that does where is chosen is named,
        and ``kept`` if it does where is judged; if none does, the one with the most hits is named.
        Numbers are those of the half that judges. Bounds that no decoder reaches, and sizes fitted
        on the sequence itself, are never named. Below 4 sequences in a half, and below the steps
        that the level takes in the half that judges, there is no verdict.

    Notes
    -----
    The cheapest of many is near the level by luck more often than not, which the sequences that
    chose it cannot tell. A domain of one prompt only chooses, in all domains together too.
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
    half_H1N = np.arange(2)[:, None] == _half(tries, vocab["sequence_id"])
    costs_C1N = tries.of_sequences(vocab, "cost_frac")[:, None]
    columns_X = (np.ones(len(tries.cell_X)), tries.columns["hit_argmax"], tries.columns["set_size"])
    for grouping in step_groups(tries.steps):
        if grouping.name not in OF_SEQUENCES:
            continue
        steps, hits, sizes = (
            tries.sums(grouping, one_X) * half_H1N[:, None, None] for one_X in columns_X
        )
        found, num_HCG = quotients(hits, steps, seed=seed), steps.sum(-1)
        with np.errstate(invalid="ignore"):  # cells that were not tried on a half
            cost_HCG, size_HCG = (one.sum(-1) / num_HCG for one in (steps * costs_C1N, sizes))
        values = (found.value, found.low, found.high, found.n, num_HCG, cost_HCG, size_HCG)
        for group, name in enumerate(grouping.groups):
            there_C = named_C & (num_HCG[:, :, group].sum(0) > 0)
            halves = (_Half(*(one[half, there_C, group] for one in values)) for half in (0, 1))
            yield _Domain(name, cells[there_C], *halves)


def _half(tries: Tries, sequence_id: pd.Series[Any]) -> np.ndarray:
    """Return the half of each sequence, int64 [N]: 0 chooses, 1 judges.

    Prompts go to the halves in turn, one domain after the other, so that all of them together are
    halved as each domain is. Samples of one prompt stay together: they are too much alike to judge
    each other.
    """
    firsts = tries.steps.drop_duplicates("sequence_id").astype({"sequence_id": str, "domain": str})
    domains = dict(zip(firsts["sequence_id"], firsts["domain"], strict=True))
    names = [name for name in sequence_id.astype(str).unique() if name in domains]
    half: dict[str, int] = {}
    for name in sorted(names, key=domains.__getitem__):
        prompt = name.rsplit("#", 1)[0]
        half.setdefault(prompt, len(half) % 2)
    return np.array([half.get(name.rsplit("#", 1)[0], 0) for name in tries.sequences])


def _verdict(domain: _Domain, level: float) -> dict[str, Any]:
    """Return the verdict on a domain."""
    if len(domain.cells):
        place, verdict, why = _chosen(domain, level)
        row = _row(domain, place)
    else:
        row = dict.fromkeys((*CELL, *_MEASURED, *_OF_CHOOSING))
        verdict, why = NOTHING, "no estimator that a decoder could run was tried"
    words = {"verdict": verdict, "why": f"{verdict}: {why}"}
    needed = steps_needed(level)
    return {"domain": domain.name, "hit_level": level, "steps_needed": needed} | row | words


def _chosen(domain: _Domain, level: float) -> tuple[int, str, str]:
    """Return the cell that is named, the verdict on it, and why."""
    choosing, judging, needed = domain.choosing, domain.judging, steps_needed(level)
    able = (choosing.n >= HALF_SEQUENCES) & (judging.n >= HALF_SEQUENCES)
    shown = able & (judging.num_steps >= needed)
    kept = _cheapest(domain, np.flatnonzero(shown & choosing.keeps(level)))
    if kept is not None:
        why = (
            f"the lower end of the interval is {choosing.low[kept]:.5g} on the "
            f"{choosing.n[kept]} sequences that chose it and {judging.low[kept]:.5g} on the "
            f"{judging.n[kept]} that judge it, where it reads {judging.cost_frac[kept]:.3g} of the "
            "full head"
        )
        return kept, KEPT if judging.keeps(level)[kept] else UNKEPT, why
    if not able.any():
        sizes = f"{choosing.n.max()} choose and {judging.n.max()} judge"
        verdict, why = FEW_SEQUENCES, f"{sizes}, {HALF_SEQUENCES} each needed"
    elif not shown.any():
        most = int(judging.num_steps[able].max())
        verdict, why = FEW_STEPS, f"{most} that judge, {needed} without a miss needed"
    else:
        verdict = UNSUITED
        why = (
            f"nothing keeps {100 * level:g} % for less than the full head on the half that chooses"
        )
    return _best(choosing), verdict, why


def _row(domain: _Domain, place: int) -> dict[str, Any]:
    """Return one cell of a domain; what does not apply is NaN."""
    cell = domain.cells.iloc[place]
    judged = {name: getattr(domain.judging, name)[place].item() for name in _MEASURED}
    chosen = {
        name: getattr(domain.choosing, own)[place].item() for name, own in _OF_CHOOSING.items()
    }
    return {name: cell[name] for name in CELL} | judged | chosen


def _cheapest(domain: _Domain, able: np.ndarray) -> int | None:
    """Return the cell of some that reads least, of equal ones the smallest size; None of none."""
    if not len(able):
        return None
    size, cost_frac = domain.cells["size"].to_numpy(), domain.choosing.cost_frac
    return int(able[np.lexsort((size[able], cost_frac[able]))[0]])


def _best(half: _Half) -> int:
    """Return the cell with the most hits of those that read less than the full head, if there are."""
    cheap = half.cost_frac < 1
    able = np.flatnonzero(cheap if cheap.any() else np.ones_like(cheap))
    return int(able[np.lexsort((half.cost_frac[able], -half.hit_argmax[able]))[0]])
