"""Which domain breaks first as the cache shrinks: a verdict, or a lead that is marked as none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit.report.formats import percent
from tracekit.report.verdict.compared import in_domains, least_loss, prompts
from tracekit.report.verdict.ranking import ranking
from tracekit.report.verdict.yardstick import COMPARED_FRAC, DOMAIN_PROMPTS

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.verdict.yardstick import Yardstick


def needs(results: Results, yardstick: Yardstick, domain: str) -> Point | None:
    """Return the smallest fraction at which an evicting policy passes in a domain; None if none."""
    return ranking(results, yardstick, domain=domain).evicting


def first_to_break(results: Results, yardstick: Yardstick) -> str:
    """Return which domain breaks first at a level, in sentences.

    Of domains with ``DOMAIN_PROMPTS`` prompts: the one in which the best evicting policy needs the
    largest kept fraction, where no policy passes first of all. One domain alone is not compared.
    Without two such domains the one with the largest mean is named, as a lead and no verdict.
    """
    have = prompts(results, yardstick.level)
    large = sorted(domain for domain, count in have.items() if count >= DOMAIN_PROMPTS)
    small = len(have) - len(large)
    counted = (
        f" {small} of {len(have)} domains are left out: fewer than {DOMAIN_PROMPTS} prompts."
        if small
        else ""
    )
    if len(large) < 2:
        return (
            f"No verdict by domain at level {yardstick.level}: {small} of {len(have)} domains have "
            f"fewer than {DOMAIN_PROMPTS} prompts." + _lead(results, yardstick)
        )
    need = {domain: needs(results, yardstick, domain) for domain in large}
    fracs = {domain: math.inf if point is None else point.x for domain, point in need.items()}
    most = max(fracs.values())
    first = [domain for domain in large if fracs[domain] == most]
    if len(first) == len(large):
        return (
            f"No domain breaks before the others at level {yardstick.level}: all {len(large)} "
            f"{_needed(most)}.{counted}"
        )
    others = max(frac for frac in fracs.values() if frac < most)
    return (
        f"{' and '.join(first)} breaks first at level {yardstick.level}: "
        f"it {_needed(most, 's')}, the next domain needs {percent(others)}.{counted}"
    )


def _needed(frac: float, ending: str = "") -> str:
    if math.isinf(frac):
        return f"pass{'es' if ending else ''} at no measured fraction"
    return f"need{ending} {percent(frac)} of the cache"


def _lead(results: Results, yardstick: Yardstick) -> str:
    """Return where the best evicting policy loses most in the mean; nothing without two domains."""
    best = least_loss(results, yardstick, COMPARED_FRAC)
    found = in_domains(results, yardstick, best) if best else {}
    if best is None or len(found) < 2:
        return ""
    worst = max(found, key=lambda domain: (found[domain].mean, domain))
    point = found[worst]
    return (
        f" A lead, no verdict: {best.family} at {percent(best.asked)} asked loses most in "
        f"{worst} ({yardstick.told(point)})."
    )
