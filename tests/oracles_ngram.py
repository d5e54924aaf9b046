"""Slow twins of the n-gram estimators, the change points and the controllers: loops over formulas.

They import nothing of the package.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def followers(text: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """Return what stands behind each occurrence of a suffix in a text, in order."""
    length = len(suffix)
    return [
        text[end]
        for end in range(length, len(text))
        if list(text[end - length : end]) == list(suffix)
    ]


def distinct(ids: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def lookup_ranking(text: Sequence[int], longest: int) -> list[int]:
    """Followers of the text's own suffixes: the longest first, then the most recent."""
    found: list[int] = []
    for length in range(min(longest, len(text)), 0, -1):
        found += reversed(followers(text, text[len(text) - length :]))
    return distinct(found)


def ngram_ranking(
    text: Sequence[int], others: Sequence[Sequence[int]], longest: int, num_rows: int
) -> list[int]:
    """Tokens of other texts by stupid back-off over these, then by length of suffix, then by id."""

    def behind(length: int) -> list[int]:
        return [i for other in others for i in followers(other, text[len(text) - length :])]

    lengths = [n for n in range(min(longest, len(text)), 0, -1) if behind(n)]
    most = max(lengths, default=0)
    keys = []
    for token in range(num_rows):
        if not any(token in other for other in others):
            continue
        length = next((n for n in lengths if token in behind(n)), 0)
        seen = behind(length) if length else [i for other in others for i in other]
        share = seen.count(token) / max(1, len(seen))
        keys.append((-(0.4 ** (most - length)) * share, -length, token))
    return [token for _, _, token in sorted(keys)]


def regimes(entropies: Sequence[float], slack: float, threshold: float) -> list[int]:
    """Page and Hinkley's test: at each step, the sums of the stretch so far from their definition."""
    numbers: list[int] = []
    start = 0
    for now in range(len(entropies)):
        stretch = entropies[start : now + 1]
        away = [x - math.fsum(stretch[: i + 1]) / (i + 1) for i, x in enumerate(stretch)]
        for sign in (1, -1):
            sums = [math.fsum(sign * d - slack for d in away[:i]) for i in range(len(away) + 1)]
            if sums[-1] - min(sums) > threshold:
                start = now
        numbers.append((numbers[-1] if numbers else 0) + (start == now and now > 0))
    return numbers


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def entropy_power(runs: Sequence[Any], gain: float, window: int) -> float:
    return gain * mean([run.entropy_nats for run in runs[-window:]]) if runs else 0.0


def rate_power(runs: Sequence[Any], gain: float, level: float, window: int) -> float:
    """Two exponential means, each as the weighted sum that it stands for."""
    if not runs:
        return 0.0
    values, keep = [run.entropy_nats for run in runs], 1 - 1 / window
    levels = [
        keep**now * values[0]
        + math.fsum(keep ** (now - i) * values[i] / window for i in range(1, now + 1))
        for now in range(len(values))
    ]
    changes = [0.0, *(b - a for a, b in itertools.pairwise(levels))]
    last = len(changes) - 1
    slope = math.fsum(keep ** (last - i) * change / window for i, change in enumerate(changes))
    return float(level * levels[-1] + gain * slope)


def drift_power(runs: Sequence[Any], gain: float, window: int) -> float:
    """One minus the cosine of the mean of the last states and that of all."""
    if not runs:
        return 0.0
    states = [[float(x) for x in run.hidden_E] for run in runs]
    now, everything = (
        [mean(column) for column in zip(*some, strict=True)] for some in (states[-window:], states)
    )
    length = math.hypot(*now) * math.hypot(*everything)
    dot = math.fsum(a * b for a, b in zip(now, everything, strict=True))
    return gain * (1 - dot / length) if length else 0.0


def free_energy(stretch: Sequence[Any]) -> float:
    """U - T S of a stretch, T the least-squares slope of U over S."""
    entropies = [run.entropy_nats for run in stretch]
    energies = [run.internal_energy for run in stretch]
    level, depth = mean(entropies), mean(energies)
    spread = math.fsum((s - level) ** 2 for s in entropies)
    joint = math.fsum((s - level) * (u - depth) for s, u in zip(entropies, energies, strict=True))
    has_slope = len(stretch) >= 3 and spread / len(stretch) >= 1e-6
    return depth - (joint / spread if has_slope else 1) * level


def thermo_power(
    runs: Sequence[Any], drive: str, gain: float, z: float, slack: float, threshold: float
) -> float:
    """Return the power that the state of the last run's stretch gives."""
    if not runs:
        return 0.0
    number = regimes([run.entropy_nats for run in runs], slack, threshold)

    def stretch(now: int) -> list[Any]:
        return [runs[i] for i in range(now + 1) if number[i] == number[now]]

    here = stretch(len(runs) - 1)
    if drive == "typical":
        level = mean([run.entropy_nats for run in here])
        return gain * (level + z * math.sqrt(mean([run.varentropy for run in here])))
    usual = mean([free_energy(stretch(now)) for now in range(len(runs))])
    return gain * (free_energy(here) - usual)
