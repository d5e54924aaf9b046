"""The policy to use: chosen on some prompts, certified on others, by a test without assumptions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.measure.risk import Conformal, conformal_budget, fewest_to_conform, fewest_to_test
from tracekit.report.recommendation.chain import Candidate, Chain, tested
from tracekit.report.recommendation.damage import PARTS
from tracekit.report.recommendation.order import order_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.options import Options
    from tracekit.report.recommendation.damage import Damage
    from tracekit.report.recommendation.order import Order


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to use, by one loss.

    Parameters
    ----------
    damage, order
        What it stands on.
    num_choosing, num_judging
        Prompts of each part.
    needed, needed_conformal
        Judging prompts without damage that a test, and conformal risk control, need at least.
    overall, by_domain
        The chains of tests; each holds at its own delta, they do not hold jointly.
    favourite
        The largest saving within alpha on the choosing prompts, else the safest; None: no candidate.
    conformal
        Conformal risk control over the amounts of the favourite's family, and the policy it chose.
    alpha
        Share of prompts that may be damaged.
    """

    damage: Damage
    order: Order
    num_choosing: int
    num_judging: int
    needed: int
    needed_conformal: int
    overall: Chain
    by_domain: tuple[Chain, ...]
    favourite: Candidate | None
    conformal: tuple[Conformal, Candidate | None] | None

    alpha: float

    @property
    def lead(self) -> Candidate | None:
        """What to try where nothing is certified, picked on the very prompts that judge.

        The largest saving of those that damage at most a share of alpha of them, else the candidate
        that damages fewest.
        """
        candidates = self.overall.candidates
        within = [one for one in candidates if one.damaged <= self.alpha * one.n]
        return within[-1] if within else min(candidates, key=_num_damaged, default=None)

    @property
    def needed_prompts(self) -> int:
        """Prompts in all of which so many judge."""
        return next(n for n in itertools.count(self.needed) if n - n // PARTS >= self.needed)


def recommend(damage: Damage, options: Options, *, seed: int) -> Recommendation:
    """Choose on a third of the prompts and certify on the others.

    Learn then test with a Pareto front: candidates are ordered from the safest to the largest
    saving on the choosing prompts, then tested in that order on the judging ones until one fails.
    With a chance of at most delta, over all of them, any that is certified damages more than alpha
    of prompts drawn as these are.

    Parameters
    ----------
    damage
        Which prompts each policy damages.
    options
        ``alpha`` and ``delta``.
    seed
        Of the bootstrap of kept fractions.
    """
    order, is_judging_P = order_of(damage, options.alpha), ~damage.is_choosing_P

    def chain(domain: str, is_judging_P: np.ndarray) -> Chain:
        candidates = tested(damage, order.front, is_judging_P, options, seed)
        return Chain(domain=domain, candidates=candidates)

    overall = chain("", is_judging_P)
    domain_P = np.array(damage.domains, dtype=object)
    favourite = _favourite(overall.candidates, options.alpha)
    conformal = None
    if favourite is not None:
        family = [one for one in order.allowed if damage.families[one] == favourite.family]
        conformal = _conformal(damage, family, options, seed)
    return Recommendation(
        damage=damage,
        order=order,
        num_choosing=int(damage.is_choosing_P.sum()),
        num_judging=int(is_judging_P.sum()),
        needed=fewest_to_test(options.alpha, options.delta),
        needed_conformal=fewest_to_conform(options.alpha),
        overall=overall,
        by_domain=tuple(
            chain(domain, is_judging_P & (domain_P == domain))
            for domain in dict.fromkeys(damage.domains)
        ),
        favourite=favourite,
        conformal=conformal,
        alpha=options.alpha,
    )


def _num_damaged(one: Candidate) -> int:
    return one.damaged


def _favourite(candidates: tuple[Candidate, ...], alpha: float) -> Candidate | None:
    """Return what the choosing prompts alone would take."""
    within = [one for one in candidates if one.chosen_damaged <= alpha * one.chosen_n]
    return within[-1] if within else next(iter(candidates), None)


def _conformal(
    damage: Damage, family: Sequence[int], options: Options, seed: int
) -> tuple[Conformal, Candidate | None]:
    """Return conformal risk control over the amounts of one family, on the judging prompts."""
    # Amounts are ordered by what the choosing prompts kept.
    kept_C = damage.kept_frac_CP[list(family)][:, damage.is_choosing_P].mean(axis=1)
    ordered = [family[place] for place in np.argsort(kept_C, kind="stable")]
    is_judging_P = ~damage.is_choosing_P
    loss_BP = damage.is_damaged_CP[ordered][:, is_judging_P].astype(np.float64)
    found = conformal_budget(loss_BP, options.alpha)
    if found.chosen is None:
        return found, None
    return found, tested(damage, [ordered[found.chosen]], is_judging_P, options, seed)[0]
