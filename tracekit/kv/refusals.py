"""What an engine refuses: policies that cannot share one, and scores that are no numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tracekit.kv.policy import Policy
    from tracekit.spec import LayerSpec


def refuse_unlike(policies: Sequence[Policy]) -> None:
    """Raise if policies cannot share an engine.

    Raises
    ------
    UsageError
        If they differ in more than their amount, one has none, or entries are each one's own.
    """
    first = policies[0]
    if len({policy.family for policy in policies}) != 1 or any(one.is_open for one in policies):
        msg = "policies that are replayed together have one family and an amount each."
        raise UsageError(msg)
    if len(policies) > 1 and (first.transform is not None or first.positions == "cache"):
        msg = "entries that are transformed or turned are replayed one policy at a time."
        raise UsageError(msg)


def refuse_places(policy: Policy, layer: LayerSpec) -> None:
    """Raise if keys cannot be turned to their place in the cache.

    Raises
    ------
    UsageError
        If the layer's distances are ALiBi biases, which no rotation moves.
    """
    if policy.positions == "cache" and layer.alibi is not None:
        msg = f"{policy.family}: positions=cache turns rotary keys, and layers have ALiBi biases."
        raise UsageError(msg)


def refuse_nan(
    score_NLGK: torch.Tensor, held_NLGK: torch.Tensor, layers: Sequence[int], policy: Policy
) -> None:
    """Raise if a held key has no number for a score.

    Parameters
    ----------
    score_NLGK, held_NLGK
        Scores of K tokens seen, and bool: keys that are there.
    layers
        Numbers of the L layers.
    policy
        Whose scores they are.

    Raises
    ------
    InputError
        If a score of a held key is not a number.
    """
    if not bool(score_NLGK.isnan().any()):
        return
    bad_NLGK = score_NLGK.isnan() & held_NLGK
    if bool(bad_NLGK.any()):
        _, layer, head, position = bad_NLGK.nonzero()[0].tolist()
        msg = (
            f"policy {policy.family!r} has no score for position {position} in layer {layers[layer]}, "
            f"KV head {head}, after {held_NLGK.shape[-1]} tokens (NaN): the queries, keys or "
            "values recorded there are not finite, so leave that layer out."
        )
        raise InputError(msg)
