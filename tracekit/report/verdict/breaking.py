"""Which domain breaks first as the cache shrinks: by more than chance, or a lead marked as none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.report.formats import percent
from tracekit.report.verdict.compared import in_domains, least_loss
from tracekit.report.verdict.prompts import by_prompt, prompt_of
from tracekit.report.verdict.yardstick import COMPARED_FRAC, DOMAIN_PROMPTS

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Point, Results
    from tracekit.report.verdict.yardstick import Yardstick

CHANCE_OF_ANY = 0.05
"""Chance that a domain is named where all are alike."""

SHUFFLES = 9_999
"""Random assignments of prompts to domains that tell what chance does."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """The domain of those compared that loses most, against all other prompts together.

    Parameters
    ----------
    domain
        Its name.
    more
        Its mean loss less that of all other prompts.
    by_chance
        What the worst domain stays at or below in 19 of 20 shuffles of the prompts over domains.
    num_prompts, num_others
        Prompts of the domain, and all others.
    num_compared
        Domains of which it is the worst.
    """

    domain: str
    more: float
    by_chance: float
    num_prompts: int
    num_others: int
    num_compared: int

    @property
    def is_clear(self) -> bool:
        """Whether the worst of domains that are all alike would rarely be as far above."""
        return self.more > self.by_chance


def worst_domain(
    loss_by_prompt: pd.Series[float], domain_by_prompt: pd.Series[str], *, seed: int
) -> Excess | None:
    """Return the domain whose loss is farthest above that of all other prompts.

    A permutation test of the largest excess (Westfall and Young 1993, max-T, one step): exact where
    all domains are alike, however few prompts there are and however skewed their losses. Intervals
    of each domain, even at a corrected level, name one too often at 8 prompts.

    Parameters
    ----------
    loss_by_prompt, domain_by_prompt
        Of one policy at one asked fraction, indexed by prompt.
    seed
        Of the shuffles.

    Returns
    -------
    Excess or None
        None below two domains of ``DOMAIN_PROMPTS`` prompts; smaller ones are among the others.
    """
    domain_P = domain_by_prompt.loc[loss_by_prompt.index].to_numpy(dtype=str)
    names, counts = np.unique(domain_P, return_counts=True)
    large_D = names[counts >= DOMAIN_PROMPTS]
    if len(large_D) < 2:
        return None
    is_in_DP = domain_P == large_D[:, None]
    loss_P = loss_by_prompt.to_numpy(np.float64)
    rng = np.random.default_rng(seed)
    shuffled_RP = rng.permuted(np.tile(loss_P, (SHUFFLES, 1)), axis=1)
    excess_D = excesses(loss_P[None], is_in_DP)[0]
    worst = int(excess_D.argmax())
    highest_R = np.sort(excesses(shuffled_RP, is_in_DP).max(axis=1))
    num_prompts = int(is_in_DP[worst].sum())
    return Excess(
        domain=str(large_D[worst]),
        more=float(excess_D[worst]),
        # The true assignment counts as one of the shuffles, which makes the test exact.
        by_chance=float(highest_R[-int(CHANCE_OF_ANY * (SHUFFLES + 1))]),
        num_prompts=num_prompts,
        num_others=len(loss_P) - num_prompts,
        num_compared=len(large_D),
    )


def excesses(loss_RP: np.ndarray, is_in_DP: np.ndarray) -> np.ndarray:
    """Return what each domain loses in the mean above all other prompts, [R, D].

    Parameters
    ----------
    loss_RP
        Losses of prompts, a row a shuffle, float64.
    is_in_DP
        Which prompts are of a domain; every domain leaves some to the others.
    """
    num_D = is_in_DP.sum(axis=1)
    sum_RD = loss_RP @ is_in_DP.T.astype(np.float64)
    rest_RD = loss_RP.sum(axis=1, keepdims=True) - sum_RD
    # Rounded, so that sums of the same numbers in another order are the same.
    found_RD: np.ndarray = np.round(sum_RD / num_D - rest_RD / (loss_RP.shape[1] - num_D), 12)
    return found_RD


def first_to_break(results: Results, yardstick: Yardstick) -> str:
    """Return which domain breaks first at a level, in sentences.

    The evicting policy that loses least over all prompts is looked at, at one asked fraction. The
    domain in which it loses most is named if that is more than chance does. Without two domains of
    ``DOMAIN_PROMPTS`` prompts the one with the largest mean is named, as a lead and no verdict.
    """
    best = least_loss(results, yardstick, COMPARED_FRAC)
    if best is None:
        return f"No verdict by domain at level {yardstick.level}: no policy evicted anything there."
    losses = by_prompt(results, yardstick.level, yardstick.measure, best.name)
    domains = _domains(results, yardstick.level)
    counts = domains.loc[losses.index].value_counts()
    small = int((counts < DOMAIN_PROMPTS).sum())
    found = worst_domain(losses, domains, seed=results.run["seed"])
    if found is None:
        return (
            f"No verdict by domain at level {yardstick.level}: {small} of {len(counts)} domains have "
            f"fewer than {DOMAIN_PROMPTS} prompts." + _lead(results, yardstick, best)
        )
    start = (
        f"{found.domain} breaks first at level {yardstick.level}"
        if found.is_clear
        else f"No domain breaks first by more than chance at level {yardstick.level}"
    )
    left = f" {small} smaller domains are among the others." if small else ""
    return f"{start}: {_told(found, best, yardstick)}{left}"


def _domains(results: Results, level: str) -> pd.Series[str]:
    """Return the domain of each prompt that has results at a level."""
    rows = results.whole[results.whole["level"] == level].drop_duplicates("sequence_id")
    found: pd.Series[str] = rows.set_index(prompt_of(rows["sequence_id"]))["domain"].astype(str)
    return found[~found.index.duplicated()]


def _told(found: Excess, best: Point, yardstick: Yardstick) -> str:
    return (
        f"asked to keep {percent(best.asked)}, {best.family} loses most in {found.domain}, its "
        f"{yardstick.name} {yardstick.write(found.more)}{yardstick.unit} above that of all other "
        f"prompts together ({found.num_prompts} prompts against {found.num_others}). By chance alone "
        f"the worst of {found.num_compared} domains lies up to {yardstick.write(found.by_chance)} "
        "above, in 19 of 20 shuffles of the prompts over the domains."
    )


def _lead(results: Results, yardstick: Yardstick, best: Point) -> str:
    """Return where the best evicting policy loses most in the mean; nothing without two domains."""
    found = in_domains(results, yardstick, best)
    if len(found) < 2:
        return ""
    worst = max(found, key=lambda domain: (found[domain].mean, domain))
    return (
        f" A lead, no verdict: {best.family} at {percent(best.asked)} asked loses most in "
        f"{worst} ({yardstick.told(found[worst])})."
    )
