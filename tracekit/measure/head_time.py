"""What gathering rows of the head and multiplying them takes here, beside the whole head.

Bytes say what a candidate set could save; time says what it does. Rows that lie scattered are
copied side by side before they are multiplied, and that copy moves each byte twice more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.head import Head

MIN_ROUNDS = 3
"""Rounds that are timed however long they take: below, a median says nothing."""


@dataclass(frozen=True, kw_only=True)
class GatherTime:
    """One set size at one batch: medians over rounds; fields are columns of ``schema.HEAD_TIMES``.

    Parameters
    ----------
    batch
        Hidden states that are multiplied at once.
    size
        Candidates of each of them.
    gathered_rows
        Rows of the union of their sets, the median over rounds.
    gather_s
        Copying these rows, scattered over the weight, side by side.
    multiply_s
        Their product with the hidden states.
    contiguous_s
        The product alone with ``size`` rows that lie side by side: one list for all.
    full_s
        The product with the whole head.
    spread_s, full_spread_s
        Interquartile range of gathering and multiplying together, and of the whole head.
    rounds
        How often each was timed.
    threads, dtype
        Threads of torch, and the head's own type.
    """

    batch: int
    size: int
    gathered_rows: int
    gather_s: float
    multiply_s: float
    contiguous_s: float
    full_s: float
    spread_s: float
    full_spread_s: float
    rounds: int
    threads: int
    dtype: str


def time_gather(
    head: Head,
    sizes: Sequence[int],
    *,
    batches: Sequence[int] = (1, 8),
    repeats: int = 25,
    budget_s: float = 1.5,
    seed: int = 0,
) -> list[GatherTime]:
    """Time candidate sets of some sizes against the whole head, alternated in one run.

    Parameters
    ----------
    head
        The head, its weight in main memory. As much memory as the largest union is taken beside it.
    sizes
        Candidates a hidden state; those above V count as V, and what is then equal is timed once.
    batches
        Hidden states at once.
    repeats
        Most rounds; a round times everything once. One more round warms up and is not counted.
    budget_s
        Seconds, warming up included, after which no further round begins once 3 are done.
    seed
        Of the sets and the hidden states.

    Returns
    -------
    list of GatherTime
        Batches in the order given, sizes in the order given within each.

    Raises
    ------
    UsageError
        If a size, a batch or the repeats are below 1, there is none, or the head is not in main
        memory.

    Notes
    -----
    Sets are random, distinct and new in each round, and so is the place of the contiguous rows: no
    cache knows them. Each hidden state of a batch has a set of its own, so their union is gathered
    and multiplied with all of them (random sets overlap less than those of related texts: the union
    is an upper bound). Ids come in ascending order, the kindest to memory, and the copy goes into a
    buffer that exists already, as a decoder's would. Finding the set, forming the union, soft-cap
    and softmax are not timed.
    """
    width = head.spec.num_rows
    for name, values in (("sizes", sizes), ("batches", batches), ("repeats", [repeats])):
        if min(values, default=0) < 1:
            msg = f"the {name} to be timed are {list(values)}: give at least one, each 1 or more."
            raise UsageError(msg)
    if head.weight_VE.device.type != "cpu":
        msg = f"the head to be timed is on {head.weight_VE.device}: give one in main memory."
        raise UsageError(msg)
    distinct = list(dict.fromkeys(min(size, width) for size in sizes))
    bench = _Bench(head, distinct, list(dict.fromkeys(batches)), seed)
    dtype = str(head.weight_VE.dtype).removeprefix("torch.")
    return [_summary(samples, dtype) for samples in _rounds(bench, repeats, budget_s)]


def _rounds(bench: _Bench, repeats: int, budget_s: float) -> list[tuple[_Sample, ...]]:
    """Return the samples of each size at each batch, as many as the time allows."""
    start = time.perf_counter()
    bench.round()
    rounds: list[list[_Sample]] = []
    least = min(repeats, MIN_ROUNDS)
    while len(rounds) < least or (len(rounds) < repeats and time.perf_counter() - start < budget_s):
        rounds.append(bench.round())
    return list(zip(*rounds, strict=True))


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One size at one batch in one round: rows of the union, and seconds."""

    batch: int
    size: int
    gathered_rows: int
    gather_s: float
    multiply_s: float
    contiguous_s: float
    full_s: float


class _Bench:
    """What all rounds share: the head, hidden states, the buffer for gathered rows."""

    def __init__(self, head: Head, sizes: Sequence[int], batches: Sequence[int], seed: int) -> None:
        self._weight_VE, self._bias_V = head.weight_VE.detach(), head.bias_V
        self._sizes, self._batches = sizes, batches
        self._random = np.random.default_rng(seed)
        num_rows, hidden_size = self._weight_VE.shape
        most_rows = min(num_rows, max(sizes) * max(batches))
        self._rows_XE = self._weight_VE.new_empty(most_rows, hidden_size)
        hidden_BE = self._random.standard_normal((max(batches), hidden_size), dtype=np.float32)
        self._hidden_BE = torch.from_numpy(hidden_BE).to(self._weight_VE)

    def round(self) -> list[_Sample]:
        """Time the whole head once a batch, and each size after it."""
        samples = []
        for batch in self._batches:
            hidden_BE = self._hidden_BE[:batch]
            full_s = _multiply(hidden_BE, self._weight_VE, self._bias_V)
            samples += [self._sample(hidden_BE, size, full_s) for size in self._sizes]
        return samples

    def _sample(self, hidden_BE: torch.Tensor, size: int, full_s: float) -> _Sample:
        ids_X = self._union(len(hidden_BE), size)
        rows_XE = self._rows_XE[: len(ids_X)]
        start = time.perf_counter()
        torch.index_select(self._weight_VE, 0, ids_X, out=rows_XE)
        bias_X = None if self._bias_V is None else self._bias_V[ids_X]
        gather_s = time.perf_counter() - start
        multiply_s = _multiply(hidden_BE, rows_XE, bias_X)
        first = int(self._random.integers(len(self._weight_VE) - size + 1))
        side_by_side = slice(first, first + size)
        bias_K = None if self._bias_V is None else self._bias_V[side_by_side]
        return _Sample(
            batch=len(hidden_BE),
            size=size,
            gathered_rows=len(ids_X),
            gather_s=gather_s,
            multiply_s=multiply_s,
            contiguous_s=_multiply(hidden_BE, self._weight_VE[side_by_side], bias_K),
            full_s=full_s,
        )

    def _union(self, batch: int, size: int) -> torch.Tensor:
        """Return the ids of the union of random sets, ascending."""
        is_in_V = np.zeros(len(self._weight_VE), dtype=bool)
        for _ in range(batch):
            is_in_V[self._random.choice(len(is_in_V), size, replace=False, shuffle=False)] = True
        return torch.from_numpy(is_in_V.nonzero()[0])


def _multiply(hidden_BE: torch.Tensor, rows_XE: torch.Tensor, bias_X: torch.Tensor | None) -> float:
    """Return the seconds of one product."""
    start = time.perf_counter()
    functional.linear(hidden_BE, rows_XE, bias_X)
    return time.perf_counter() - start


def _summary(samples: Sequence[_Sample], dtype: str) -> GatherTime:
    """Return the medians of one size at one batch."""
    medians = {
        name: float(np.median([getattr(one, name) for one in samples]))
        for name in ("gather_s", "multiply_s", "contiguous_s", "full_s")
    }
    return GatherTime(
        batch=samples[0].batch,
        size=samples[0].size,
        gathered_rows=round(float(np.median([one.gathered_rows for one in samples]))),
        spread_s=_interquartile([one.gather_s + one.multiply_s for one in samples]),
        full_spread_s=_interquartile([one.full_s for one in samples]),
        rounds=len(samples),
        threads=torch.get_num_threads(),
        dtype=dtype,
        **medians,
    )


def _interquartile(values: Sequence[float]) -> float:
    low, high = np.percentile(values, [25, 75])
    return float(high - low)
