"""Plans of layer budgets: what all layers look like at the first decision, frozen into shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracekit.kv.budget import Allotment
from tracekit.kv.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.reference import Reference
    from tracekit.kv.replay import Setting


def observe(policy: Policy, reference: Reference, setting: Setting) -> torch.Tensor | None:
    """Return what the plan of a policy must know of a stack of layers, [L, ...].

    None if it needs nothing, or if the sequence has no eviction point.
    """
    point = policy.schedule.point(setting.spans)
    if policy.layers.is_uniform or point is None or point >= reference.num_rows:
        return None
    needs = policy.layers.needs
    engine = Engine(
        reference.layer,
        setting.layers,
        [policy],
        allotment=Allotment(setting.cache, []),
        seed=setting.seed,
        rope=reference.rope,
    )
    engine.absorb(
        *reference.rows(0, point), reference.accumulated(needs.accumulated, point)
    )
    return policy.layers.observe(engine.view(needs))


def make_shares(
    policies: Sequence[Policy], observed: Iterable[torch.Tensor | None], setting: Setting
) -> tuple[tuple[torch.Tensor, ...], ...] | None:
    """Return the frozen shares of each policy, by layer; None if there is nothing to plan.

    Parameters
    ----------
    policies
        N policies of one family.
    observed
        What ``observe`` gave for the stacks of the cache, in order.
    setting
        Of any of the stacks.
    """
    first = policies[0]
    point = first.schedule.point(setting.spans)
    if first.layers.is_uniform or point is None:
        return None
    rows = [row for stack in observed if stack is not None for row in stack]
    budgets = [
        setting.cache.tokens(policy.kept, point) for policy in policies if policy.kept is not None
    ]
    return tuple(
        tuple(first.layers.plan(setting.cache, budget, point, rows)) for budget in budgets
    )
