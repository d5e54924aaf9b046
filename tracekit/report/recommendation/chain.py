"""A chain of tests: candidates from the safest to the largest saving, until one fails."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.measure.risk import binomial_p_value, fixed_sequence, upper_bound
from tracekit.measure.stats import Interval, bootstrap_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from tracekit.report.options import Options
    from tracekit.report.recommendation.damage import Damage

_KEPT = re.compile(r"[:,]kept=([^,+]+)")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy at one kept amount, as the choosing and the judging prompts saw it.

    Parameters
    ----------
    policy, family
        Canonical text, and short name.
    chosen_damaged, chosen_n
        Damaged prompts among those that choose.
    damaged, n
        Damaged prompts among those that judge.
    p_value
        Of "more than alpha of all prompts are damaged", from the judging prompts.
    upper
        Share of damaged prompts that is not exceeded, with confidence 1 - delta, for it alone.
    kept
        Kept fraction on the judging prompts, with its 95 % bootstrap interval.
    kv_bytes, full_kv_bytes
        Bytes held and of the full cache there, means over prompts and steps.
    num_idle, num_clipped, num_clamped
        Judging prompts in which nothing was evicted; with a budget below what was to be protected;
        with one above what the full cache held.
    is_tested, is_certified
        Whether the chain of tests reached it, and rejected.
    """

    policy: str
    family: str
    chosen_damaged: int
    chosen_n: int
    damaged: int
    n: int
    p_value: float
    upper: float
    kept: Interval
    kv_bytes: float
    full_kv_bytes: float
    num_idle: int
    num_clipped: int
    num_clamped: int
    is_tested: bool
    is_certified: bool

    @property
    def asked(self) -> str:
        """What it was asked to keep, as its text says it; '' where that is all, or nothing."""
        found = None if self.policy.startswith("full:") else _KEPT.search(self.policy)
        return found[1] if found else ""

    @property
    def name(self) -> str:
        """Family and amount: ``snapkv at kept=0.25``."""
        return f"{self.family} at kept={self.asked}" if self.asked else self.family


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The chain of tests on some prompts: all that judge, or those of one domain.

    Parameters
    ----------
    domain
        Its name; '' for all.
    candidates
        From the safest to the largest saving, in the order that the choosing prompts of
        all domains gave.
    """

    domain: str
    candidates: tuple[Candidate, ...]

    @property
    def n(self) -> int:
        """Prompts that judge."""
        return self.candidates[0].n if self.candidates else 0

    @property
    def certified(self) -> Candidate | None:
        """The largest saving that was certified."""
        return next((one for one in reversed(self.candidates) if one.is_certified), None)


def tested(
    damage: Damage,
    numbers: Sequence[int],
    is_judging_P: np.ndarray,
    options: Options,
    seed: int,
) -> tuple[Candidate, ...]:
    """Return candidates in the order of tests, tested in turn until one fails.

    Parameters
    ----------
    damage
        Which prompts each policy damages.
    numbers
        Of the policies, in an order that was fixed without the judging prompts.
    is_judging_P
        Prompts that judge.
    options
        ``alpha`` and ``delta``.
    seed
        Of the bootstrap of kept fractions.

    Returns
    -------
    tuple
        Empty without a prompt that judges.
    """
    n = int(is_judging_P.sum())
    if not n or not numbers:
        return ()
    damaged_C = damage.is_damaged_CP[list(numbers)][:, is_judging_P].sum(axis=1)
    p_value_C = binomial_p_value(damaged_C, n, options.alpha)
    num_certified = fixed_sequence(p_value_C, options.delta)

    def candidate(place: int, number: int) -> Candidate:
        chosen_P, damaged = (
            damage.is_damaged_CP[number, damage.is_choosing_P],
            int(damaged_C[place]),
        )
        return Candidate(
            policy=damage.policies[number],
            family=damage.families[number],
            chosen_damaged=int(chosen_P.sum()),
            chosen_n=len(chosen_P),
            damaged=damaged,
            n=n,
            p_value=float(p_value_C[place]),
            upper=upper_bound(damaged, n, options.delta),
            kept=bootstrap_mean(damage.kept_frac_CP[number, is_judging_P], seed=seed),
            kv_bytes=float(damage.kv_bytes_CP[number, is_judging_P].mean()),
            full_kv_bytes=float(damage.full_kv_bytes_CP[number, is_judging_P].mean()),
            num_idle=int(damage.is_idle_CP[number, is_judging_P].sum()),
            num_clipped=int(damage.is_clipped_CP[number, is_judging_P].sum()),
            num_clamped=int(damage.is_clamped_CP[number, is_judging_P].sum()),
            is_tested=place <= num_certified,
            is_certified=place < num_certified,
        )

    return tuple(itertools.starmap(candidate, enumerate(numbers)))
