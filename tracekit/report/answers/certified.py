"""What holds on prompts that did not choose the policy, in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.recommendation.damage import LEVEL, kl_damage
from tracekit.report.recommendation.evidence import goal
from tracekit.report.recommendation.recommend import recommend

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options

_SAME = "what is said above was chosen and judged on the same prompts; on others"
_WHERE = '(see "Which policy to use")'


def certified(results: Results, options: Options) -> str:
    """Return which policy the recommendation certifies, or that it certifies none."""
    damage = kl_damage(results, options)
    if not damage.prompts:
        return f"{_SAME} nothing can be certified without level {LEVEL}."
    best = recommend(damage, options, seed=int(results.run["seed"])).overall.certified
    if best is None:
        return f"{_SAME} no policy is certified for {goal(options)}, level {LEVEL} {_WHERE}."
    return f"{_SAME} {best.name} is certified: {goal(options)}, level {LEVEL} {_WHERE}."
