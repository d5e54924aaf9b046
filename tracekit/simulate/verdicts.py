"""Which estimator keeps the most likely token in which domain: chosen on one half, judged on another."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.schema import DECODED_FITS
from tracekit.simulate.prompt_halves import Halves
from tracekit.simulate.quotients import quotients
from tracekit.simulate.scheme_name import scheme_name
from tracekit.simulate.step_groups import OF_SEQUENCES, step_groups
from tracekit.simulate.tries import CELL
from tracekit.vocab.scheme import parse_scheme

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from tracekit.simulate.tries import Tries

LEVELS = (0.99, 0.999)
"""Shares of steps whose most likely token is to be a candidate."""

HALF_PROMPTS = 4
"""Fewer prompts of a domain in a half, of 8 in all, have no verdict."""

KEPT, UNKEPT, UNSUITED = "kept", "not kept on the other half", "not suitable"
FEW_PROMPTS, FEW_STEPS = "too few prompts", "not enough steps"
NOTHING = "nothing to judge"

_OF_CHOOSING = {"n_choosing": "n", "hit_choosing": "hit_argmax", "low_choosing": "low"}
"""Columns that say what the half that chose saw."""


@dataclass(frozen=True, eq=False)
class _Half:
    """What the cells did on one half of the prompts of a domain, arrays [C]; n counts prompts."""

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
        Of the resampling of prompts.

    Returns
    -------
    dict
        All domains together, then each, at 99 % and 99.9 %. Prompts go to two halves in turn, one
        domain after the other: the first, third ... of all choose, the others judge. A set keeps a
        level on a half if the lower end of the interval of its hits there is at or above it, and it
        reads less than the full head. The cheapest that does where is chosen is named, and ``kept``
        if it does where is judged; if none does, the one with the most hits where is chosen is
        named, or where is judged if no prompt of the domain chooses. Numbers are those of the half
        that judges. What no decoder that prunes at every step could do (``Scheme.is_method``), and
        sizes fitted on the sequence itself, are never named. Below 4 prompts in a half, and below
        the steps in a half that the level takes without a miss, there is no verdict.

    Notes
    -----
    The samples of one prompt and the windows of one text (``NAME#0``, ``NAME#1``) are too much alike
    to count apart: their steps are summed, and prompts are halved, resampled and counted.

    Where nothing was missed each resample is 1 and the bootstrap knows nothing: there the lower end
    is at most 1 - 3 / steps of that half, by the rule of three, as if steps were independent.

    The cheapest of many is near the level by luck more often than not, which the prompts that chose
    it cannot tell. The halves go on from one domain to the next, so that all domains together are
    halved evenly too; a domain of one prompt may choose or judge, and has no verdict.
    """
    rows = [_verdict(domain, level) for domain in _domains(tries, vocab, seed) for level in LEVELS]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _domains(tries: Tries, vocab: pd.DataFrame, seed: int) -> Iterator[_Domain]:
    """Yield all steps, then those of each domain."""
    named_C = _named(tries.cells)
    halves_of = Halves.of(tries, vocab["sequence_id"])
    costs_C1N = tries.of_sequences(vocab, "cost_frac")[:, None]
    columns_X = (np.ones(len(tries.cell_X)), tries.columns["hit_argmax"], tries.columns["set_size"])
    for grouping in step_groups(tries.steps):
        if grouping.name not in OF_SEQUENCES:
            continue
        steps, hits, sizes = (tries.sums(grouping, one_X) for one_X in columns_X)
        steps, costs, hits, sizes = map(halves_of.sums, (steps, steps * costs_C1N, hits, sizes))
        found, num_HCG = quotients(hits, steps, seed=seed), steps.sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):  # cells that were not tried on a half
            cost_HCG, size_HCG = (one.sum(-1) / num_HCG for one in (costs, sizes))
            sure_HCG = np.minimum(found.low, 1 - 3 / num_HCG)
        low_HCG = np.where(hits.sum(-1) == num_HCG, sure_HCG, found.low)
        values = (found.value, low_HCG, found.high, found.n, num_HCG, cost_HCG, size_HCG)
        for group, name in enumerate(grouping.groups):
            there_C = named_C & (num_HCG[:, :, group].sum(0) > 0)
            halves = (_Half(*(one[half, there_C, group] for one in values)) for half in (0, 1))
            yield _Domain(name, tries.cells[there_C], *halves)


def _named(cells: pd.DataFrame) -> np.ndarray:
    """Return which cells may be named, bool [C]: methods with sizes that a decoder can have."""
    schemes = [
        scheme_name(estimator, controller)
        for estimator, controller in zip(cells["estimator"], cells["controller"], strict=True)
    ]
    is_method = {text: parse_scheme(text).is_method for text in set(schemes)}
    named_C: np.ndarray = np.array([is_method[text] for text in schemes], dtype=bool)
    named_C &= cells["fit"].isin(DECODED_FITS).to_numpy()
    return named_C


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
    able = np.minimum(choosing.n, judging.n) >= HALF_PROMPTS
    shown = able & (np.minimum(choosing.num_steps, judging.num_steps) >= needed)
    kept = _cheapest(domain, np.flatnonzero(shown & choosing.keeps(level)))
    if kept is not None:
        return kept, KEPT if judging.keeps(level)[kept] else UNKEPT, _why(domain, kept)
    if not able.any():
        sizes = f"{choosing.n.max()} choose and {judging.n.max()} judge"
        verdict, why = FEW_PROMPTS, f"{sizes}, {HALF_PROMPTS} each needed"
    elif not shown.any():
        most = (int(half.num_steps[able].max()) for half in (choosing, judging))
        verdict = FEW_STEPS
        why = "{} choose and {} judge, {} each needed without a miss".format(*most, needed)
    else:
        verdict = UNSUITED
        why = (
            f"nothing keeps {100 * level:g} % for less than the full head on the half that chooses"
        )
    return _best(domain), verdict, why


def _why(domain: _Domain, place: int) -> str:
    """Return the evidence on a cell that kept the level where it was chosen."""
    ends = (
        f"{half.low[place]:.5g}{_sure(half, place)} on the {half.n[place]} prompts that {did} it"
        for half, did in ((domain.choosing, "chose"), (domain.judging, "judge"))
    )
    return (
        f"the lower end of the interval is {' and '.join(ends)}, where it reads "
        f"{domain.judging.cost_frac[place]:.3g} of the full head"
    )


def _sure(half: _Half, place: int) -> str:
    """Return, where nothing was missed, what the lower end goes by."""
    if half.hit_argmax[place] < 1:
        return ""
    return f" (1 - 3 / {half.num_steps[place]:.0f} steps, none missed)"


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


def _best(domain: _Domain) -> int:
    """Return the cell with the most hits of those that read less than the full head, if there are.

    What counts is the half that chooses; where that is empty, the one that judges.
    """
    half = domain.choosing if domain.choosing.n.any() else domain.judging
    tried = half.n > 0
    cheap = tried & (half.cost_frac < 1)
    able = np.flatnonzero(cheap if cheap.any() else tried)
    return int(able[np.lexsort((half.cost_frac[able], -half.hit_argmax[able]))[0]])
