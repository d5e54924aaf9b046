"""Plans of layer budgets: what all layers look like at the first decision, frozen into shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.errors import InputError, UsageError
from tracekit.kv.allotment import Allotment
from tracekit.kv.budget import LAYER_BUDGETS
from tracekit.kv.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from tracekit.kv.policy import Policy
    from tracekit.kv.reference import Reference
    from tracekit.kv.replay import Setting


def observe(policy: Policy, reference: Reference, setting: Setting) -> torch.Tensor | None:
    """Return what the plan of a policy must know of a stack of layers, [L, ...].

    None if it needs nothing, or if the sequence has no eviction point.

    Parameters
    ----------
    policy
        Of its family; amounts play no part.
    reference
        The recorded rows of the stack.
    setting
        Which layers of which cache, and where the sequence has its parts.
    """
    point, needs = policy.schedule.point(setting.spans), policy.layers.needs
    if not policy.layers.looks or point is None or point >= reference.num_rows:
        return None
    engine = Engine(
        reference.layer,
        setting.layers,
        [policy],
        allotment=Allotment(setting.cache, []),
        seed=setting.seed,
        rope=reference.rope,
    )
    engine.absorb(*reference.rows(0, point), reference.accumulated(needs.accumulated, point))
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

    Raises
    ------
    UsageError
        If the plan looks at all layers and some were not observed, or if it misses a parameter.
    InputError
        If what was observed is not a number, or if a file that the plan reads is not as it must be.
    """
    first = policies[0]
    point = first.schedule.point(setting.spans)
    if first.layers.is_uniform or point is None:
        return None
    rows = [row.cpu() for stack in observed if stack is not None for row in stack]
    _check(rows, first, setting)
    budgets = [
        setting.cache.tokens(policy.kept, point) for policy in policies if policy.kept is not None
    ]
    return tuple(tuple(first.layers.plan(setting.cache, budget, point, rows)) for budget in budgets)


def _check(rows: Sequence[torch.Tensor], policy: Policy, setting: Setting) -> None:
    """Raise if what was observed is not a number for each layer of the cache."""
    name, layers = LAYER_BUDGETS.name_of(type(policy.layers)), setting.cache.layers
    if policy.layers.looks and len(rows) != len(layers):
        msg = (
            f"layers={name} shares out over all {len(layers)} layers that hold keys, but "
            f"{len(rows)} were observed: record them all, or choose another budget."
        )
        raise UsageError(msg)
    for layer, row in zip(layers, rows, strict=False):
        if not row.isfinite().all():
            msg = (
                f"layers={name} has no number for layer {layer.index} (NaN): the queries or keys "
                "recorded there are not finite, so leave that layer out."
            )
            raise InputError(msg)
