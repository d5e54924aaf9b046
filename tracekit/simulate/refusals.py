"""What a plan needs of a trace, said before anything is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.errors import TraceError, UsageError
from tracekit.kv.budget import Cache
from tracekit.simulate.stacks import can_replay, why_no_layer
from tracekit.trace import layout

if TYPE_CHECKING:
    from tracekit.simulate.plan import Plan
    from tracekit.trace.reader import Trace


def refuse_impossible(trace: Trace, plan: Plan) -> None:
    """Raise if a plan cannot be run on a trace.

    Raises
    ------
    TraceError
        If the trace lacks what the plan needs; the capture that has it is named.
    UsageError
        If no policy could turn its keys as asked.
    InputError
        If a file that a budget needs is not as it must be.
    """
    if not trace.shards:
        msg = f"{trace.path} holds no finished sequence yet; run the same record command to go on."
        raise TraceError(msg)
    replays = plan.families and set(plan.all_levels) != {"propagated"}
    if replays and not layout.holds(trace.capture, "qkv"):
        msg = (
            f"KV replay needs queries, keys and values: {trace.path} was recorded with --capture "
            f"{trace.capture}, record it with --capture qkv, name --vocab alone, or --level "
            "propagated, which runs the model."
        )
        raise TraceError(msg)
    if (
        plan.families
        and "predicted" in plan.all_levels
        and not layout.holds(trace.capture, "influence")
    ):
        msg = (
            f"level predicted (--level, --calibrate) needs influence probes: {trace.path} was "
            f"recorded with --capture {trace.capture}, record it with --capture influence."
        )
        raise TraceError(msg)
    why = why_no_layer(trace)
    if plan.families and not plan.schemes and why is not None:
        msg = f"{why}: {trace.spec.name} has nothing for --kv, name --vocab instead."
        raise TraceError(msg)
    if plan.schemes and trace.capture == "steps":
        msg = (
            f"vocabulary replay needs final hidden states: {trace.path} was recorded with "
            "--capture steps, record it with --capture hidden or qkv."
        )
        raise TraceError(msg)
    cache = Cache(tuple(one for one in trace.spec.layers if can_replay(one)))
    for policy in plan.policies:
        policy.layers.require(cache)
        # Layers without a rotary embedding in a model of learned positions hold them in the keys.
        if policy.positions == "cache" and not trace.spec.ropes and trace.spec.max_positions:
            msg = f"{policy.family}: positions=cache turns rotary keys; this model has none."
            raise UsageError(msg)
