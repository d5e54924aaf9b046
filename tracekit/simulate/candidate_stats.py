"""Statistics of candidate sets over scored steps, by group of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.simulate.quotients import Quotients, quotients
from tracekit.simulate.runs_of_hits import EXACT_STEPS, runs_of_hits
from tracekit.simulate.step_groups import OF_SEQUENCES, Grouping, step_groups
from tracekit.simulate.tries import CELL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

    from tracekit.simulate.tries import Tries

MEANS = {
    "hit_chosen": "hit_chosen",
    "hit_argmax": "hit_argmax",
    "hit_top_k": "hit_top_k",
    "hit_top_p": "hit_top_p",
    "hit_min_p": "hit_min_p",
    "mass": "mass",
    "neg_log_mass_mean": "neg_log_mass_nats",
    "jsd_mean": "jsd_nats",
    "backoff_kl_mean": "backoff_kl_nats",
    "backoff_kl_causal_mean": "backoff_kl_causal_nats",
    "fallback_frac": "is_fallback",
    "set_size_mean": "set_size",
}
"""Column of which a statistic is the mean; ``mass`` is draft acceptance."""

PERCENTS = {
    "max": 100,
    "p99.9": 99.9,
    "p99": 99,
    "p95": 95,
    "p90": 90,
    "median": 50,
    "p10": 10,
    "p5": 5,
    "p1": 1,
    "p0.1": 0.1,
    "min": 0,
}
"""Percentiles of -ln m, in llama.cpp's order."""

UNITS = {
    **dict.fromkeys(("hit_chosen", "hit_argmax", "hit_top_k", "hit_top_p", "hit_min_p"), ""),
    "mass": "",
    "neg_log_mass_mean": "nats",
    **{f"neg_log_mass_{name}": "nats" for name in PERCENTS},
    **dict.fromkeys(("jsd_mean", "backoff_kl_mean", "backoff_kl_causal_mean"), "nats"),
    **dict.fromkeys(("ppl_full", "ppl_backoff"), ""),
    **dict.fromkeys(("run_mean", "run_if_independent"), "steps"),
    **dict.fromkeys((f"exact_{EXACT_STEPS}_frac", f"exact_{EXACT_STEPS}_if_independent"), ""),
    "fallback_frac": "",
    **dict.fromkeys(("set_size_mean", "set_size_p95"), "tokens"),
    **dict.fromkeys(("cost_frac", "macs_frac"), ""),
}
"""All statistics, in order, and their units."""


@dataclass(frozen=True, eq=False)
class _Told:
    """One statistic of all cells and groups of a grouping, [C, G] each."""

    name: str
    found: Quotients
    num_steps: np.ndarray


def candidate_stats(tries: Tries, vocab: pd.DataFrame, *, seed: int) -> dict[str, Any]:
    """Return the columns of ``schema.CANDIDATE_STATS``.

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
        Cells in order, all steps before groups, statistics in the order of ``UNITS``. Means have
        intervals. Only of all steps and of domains are told: percentiles of -ln m, interpolated
        linearly; perplexity, of given text alone, because a model is sure of what it has chosen
        itself; costs; and runs of steps whose most likely token is a candidate. ``run_mean`` is the
        mean length of all maximal runs, those that the end of a sequence cuts counted as they are;
        beside it 1 / (1 - h), null where nothing was missed. ``exact_256_frac`` is the share of
        windows of 256 steps without a miss; beside it h^256.

    Notes
    -----
    Source: entropy.md 6.5 and section 0 (8). There is no perplexity of hits alone: renormalised
    sets look better than the full model on them.
    """
    parts: list[dict[str, np.ndarray]] = []
    groupings = step_groups(tries.steps)
    names = list(UNITS)
    for number, grouping in enumerate(groupings):
        told = list(_means(tries, grouping, seed))
        if grouping.name in OF_SEQUENCES:
            told += _of_sequences(tries, grouping, vocab, seed)
        parts += [_flat(one, number, names.index(one.name)) for one in told]
    flat = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort([flat[name] for name in ("statistic", "group", "grouping", "cell")])
    flat = {name: values[order] for name, values in flat.items()}
    return _named(flat, tries, groupings, names)


def percentiles(
    values_X: np.ndarray, code_X: np.ndarray, num: int, percents: Sequence[float]
) -> np.ndarray:
    """Return percentiles of the values of each code below ``num``, [num, P], interpolated linearly.

    NaN where a code has no value; between a number and infinity lies infinity.
    """
    there = code_X >= 0
    values_X, code_X = np.asarray(values_X, dtype=np.float64)[there], code_X[there]
    sorted_X = values_X[np.lexsort((values_X, code_X))]
    count_K = np.bincount(code_X, minlength=num)
    start_K, last_K = np.cumsum(count_K) - count_K, count_K - 1
    place_KP = np.asarray(percents) / 100 * last_K[:, None].clip(min=0)
    below_KP = place_KP.astype(np.int64)
    share_KP = place_KP - below_KP
    above_KP = np.minimum(below_KP + 1, last_K[:, None].clip(min=0))
    padded_X = np.append(sorted_X, np.nan)
    low, high = (padded_X[(start_K[:, None] + one)] for one in (below_KP, above_KP))
    with np.errstate(invalid="ignore"):
        mixed = low + share_KP * (high - low)
    found = np.where((share_KP == 0) | (low == high), low, mixed)
    return np.where(count_K[:, None] > 0, found, np.nan)


def _means(tries: Tries, grouping: Grouping, seed: int) -> Iterator[_Told]:
    """Yield means over steps, and the 95th percentile of the set size."""
    steps_CGN = tries.sums(grouping, np.ones(len(tries.cell_X)))
    num_CG = steps_CGN.sum(-1)
    values = dict(tries.columns) | {"mass": np.exp(-tries.columns["neg_log_mass_nats"])}
    for name, column in MEANS.items():
        sums_CGN = tries.sums(grouping, values[column])
        yield _Told(name, quotients(sums_CGN, steps_CGN, seed=seed), num_CG)
    size_CG1 = _percentiles(tries, grouping, tries.columns["set_size"], (95,))
    yield _Told("set_size_p95", _plain(size_CG1[..., 0], steps_CGN), num_CG)


def _of_sequences(
    tries: Tries, grouping: Grouping, vocab: pd.DataFrame, seed: int
) -> Iterator[_Told]:
    """Yield what is told of groups of whole sequences alone."""
    steps_CGN = tries.sums(grouping, np.ones(len(tries.cell_X)))
    num_CG = steps_CGN.sum(-1)
    found_CGP = _percentiles(
        tries, grouping, tries.columns["neg_log_mass_nats"], tuple(PERCENTS.values())
    )
    for place, name in enumerate(PERCENTS):
        found = _plain(found_CGP[..., place], steps_CGN)
        yield _Told(f"neg_log_mass_{name}", found, num_CG)
    yield from _perplexities(tries, grouping, seed)
    yield from _runs(tries, grouping, num_CG, seed)
    for name in ("cost_frac", "macs_frac"):
        spent_CGN = steps_CGN * tries.of_sequences(vocab, name)[:, None]
        yield _Told(name, quotients(spent_CGN, steps_CGN, seed=seed), num_CG)


def _perplexities(tries: Tries, grouping: Grouping, seed: int) -> Iterator[_Told]:
    """Yield perplexities of given text."""
    is_given_S = tries.steps["is_given"].to_numpy(dtype=bool)
    if not is_given_S.any():
        return
    given = Grouping(grouping.name, grouping.groups, np.where(is_given_S, grouping.code_S, -1))
    steps_CGN = tries.sums(given, np.ones(len(tries.cell_X)))
    full_X = tries.steps["nll_full"].to_numpy(np.float64)[tries.step_X]
    for name, nll_X in (("ppl_full", full_X), ("ppl_backoff", tries.columns["nll_backoff"])):
        mean = quotients(tries.sums(given, nll_X), steps_CGN, seed=seed)
        yield _Told(name, _rising(mean, np.exp), steps_CGN.sum(-1))


def _runs(tries: Tries, grouping: Grouping, num_CG: np.ndarray, seed: int) -> Iterator[_Told]:
    """Yield what runs of hits say, beside what independent hits would say."""
    is_hit_X = tries.columns["hit_argmax"].astype(bool)
    place_X = tries.cell_X * len(tries.sequences) + tries.sequence_X
    is_first_X = np.diff(place_X, prepend=-1) != 0
    begins_X, run_X, length_X = runs_of_hits(is_hit_X, is_first_X)
    # A sequence without a hit has no run, not one of length 0.
    hits_CGN, begins_CGN, steps_CGN, exact_CGN, windows_CGN = (
        tries.sums(grouping, one)
        for one in (
            is_hit_X,
            begins_X,
            np.ones(len(is_hit_X)),
            run_X >= EXACT_STEPS,
            length_X >= EXACT_STEPS,
        )
    )
    hit = quotients(hits_CGN, steps_CGN, seed=seed)
    exact = f"exact_{EXACT_STEPS}"
    yield _Told("run_mean", quotients(hits_CGN, begins_CGN, seed=seed), num_CG)
    yield _Told("run_if_independent", _rising(hit, _until_miss), num_CG)
    yield _Told(f"{exact}_frac", quotients(exact_CGN, windows_CGN, seed=seed), num_CG)
    yield _Told(f"{exact}_if_independent", _rising(hit, lambda h: h**EXACT_STEPS), num_CG)


def _until_miss(hit: np.ndarray) -> np.ndarray:
    """Return 1 / (1 - h), NaN where nothing is missed."""
    with np.errstate(divide="ignore"):
        return np.where(hit < 1, 1 / (1 - hit), np.nan)


def _rising(found: Quotients, function: Any) -> Quotients:
    """Return a rising function of quotients: their draws keep their order, so ends stay ends."""
    value, low, high = (function(one) for one in (found.value, found.low, found.high))
    return Quotients(value, low, high, found.n)


def _plain(value_CG: np.ndarray, steps_CGN: np.ndarray) -> Quotients:
    """Return values without an interval."""
    none_CG = np.full(value_CG.shape, np.nan)
    return Quotients(value_CG, none_CG, none_CG, (steps_CGN > 0).sum(-1))


def _percentiles(
    tries: Tries, grouping: Grouping, values_X: np.ndarray, percents: Sequence[float]
) -> np.ndarray:
    """Return percentiles of each cell and group, [C, G, P]."""
    shape = (len(tries.cells), len(grouping.groups))
    group_X = grouping.code_S[tries.step_X]
    code_X = np.where(group_X < 0, -1, tries.cell_X * shape[1] + group_X)
    return percentiles(values_X, code_X, shape[0] * shape[1], percents).reshape(*shape, -1)


def _flat(told: _Told, grouping: int, statistic: int) -> dict[str, np.ndarray]:
    """Return a statistic as rows, those of groups without a step left out."""
    cell, group = np.nonzero(told.num_steps)
    found = told.found
    return {
        "cell": cell,
        "grouping": np.full(len(cell), grouping),
        "group": group,
        "statistic": np.full(len(cell), statistic),
        "value": found.value[cell, group],
        "low": found.low[cell, group],
        "high": found.high[cell, group],
        "n": found.n[cell, group],
        "num_steps": told.num_steps[cell, group].astype(np.int64),
    }


def _named(
    flat: dict[str, np.ndarray], tries: Tries, groupings: Sequence[Grouping], names: Sequence[str]
) -> dict[str, Any]:
    """Return rows with names for numbers."""
    kinds = [grouping.name for grouping in groupings]
    first = np.cumsum([0, *(len(grouping.groups) for grouping in groupings)])
    groups = [group for grouping in groupings for group in grouping.groups]
    made: dict[str, Any] = {name: tries.cells[name].to_numpy()[flat["cell"]] for name in CELL}
    words: Mapping[str, tuple[Sequence[str], np.ndarray]] = {
        "grouping": (kinds, flat["grouping"]),
        "group": (groups, first[flat["grouping"]] + flat["group"]),
        "statistic": (names, flat["statistic"]),
        "unit": (list(UNITS.values()), flat["statistic"]),
    }
    made |= {name: np.array(texts, dtype=object)[code] for name, (texts, code) in words.items()}
    return made | {name: flat[name] for name in ("value", "low", "high", "n", "num_steps")}
