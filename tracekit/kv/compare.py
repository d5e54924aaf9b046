"""Attention of some rows under a policy against the same rows under the full cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracekit.kv.attend import to_heads
from tracekit.kv.engine import NEVER
from tracekit.kv.entries import Entries, count_entries
from tracekit.kv.measures import (
    Measures,
    cosine_of,
    minus_log,
    overlap,
    projected_sq,
    sink_share,
)

if TYPE_CHECKING:
    from tracekit.kv.engine import Engine
    from tracekit.kv.reader import Outcome
    from tracekit.kv.reference import FullRows, Reference
    from tracekit.spec import LayerSpec


def compare(
    engine: Engine,
    output_NLHQD: torch.Tensor,
    outcome: Outcome,
    full: FullRows,
    reference: Reference,
    point: int,
) -> Measures[torch.Tensor]:
    """Return the measures of the newest rows that an engine has read.

    Parameters
    ----------
    engine
        After reading them.
    output_NLHQD
        What it gave.
    outcome
        How it came about.
    full
        The same rows under the full cache.
    reference
        The recorded rows.
    point
        The first scored row.
    """
    num_sets, num_keys = len(output_NLHQD), outcome.weights_LGNMQK.shape[-1]
    if engine.policy.is_plain:
        stays_NLGK = engine.evicted_at_NLGK[..., :num_keys] == NEVER
        mass_kept_NLHR, row_kl_NLHR = _plain(engine.layer, stays_NLGK, full)
    else:
        mass_kept_NLHR, row_kl_NLHR = _chosen(engine.layer, outcome, full)
    entries = count_entries(engine, outcome)
    delta_NLHQD = output_NLHQD - full.output_LHQD
    error_sq_NLHQ = delta_NLHQD.square().sum(-1)
    norm_sq_LHQ = full.output_LHQD.square().sum(-1)
    return Measures(
        **{
            name: counts.expand(num_sets, -1, -1, -1)
            for name, counts in zip(Entries._fields, entries, strict=True)
        },
        error_sq_NLHR=error_sq_NLHQ,
        norm_sq_LHR=norm_sq_LHQ,
        cosine_NLHR=cosine_of(output_NLHQD.square().sum(-1), norm_sq_LHQ, error_sq_NLHQ),
        mass_kept_NLHR=mass_kept_NLHR,
        row_kl_NLHR=row_kl_NLHR,
        overlap_NLGR=overlap(
            reference,
            point,
            outcome.rows,
            lambda q: outcome.seen_NLGQK[..., q, :],
            outcome.seen_NLGQK.shape[:3],
        ).expand(num_sets, -1, -1, -1),
        projected_sq_NLXR=projected_sq(delta_NLHQD, reference),
        projected_norm_sq_LXR=projected_sq(full.output_LHQD[None], reference)[0],
        influence_NLGPR=_influence(delta_NLHQD, outcome, reference),
    )


def oracle_overlap(engine: Engine, point: int, reference: Reference) -> torch.Tensor:
    """Return how much of what the first decision left is what later rows attend to most.

    Parameters
    ----------
    engine
        After all rows.
    point
        Tokens seen at the first decision.
    reference
        The recorded rows.

    Returns
    -------
    Tensor
        [N, L, G]: of as many keys as were left, the part of the best ones that was.
    """
    left_NLGK = engine.evicted_at_NLGK[..., :point] > point
    if engine.layer.window is not None:
        left_NLGK[..., : -engine.layer.window] = False
    count_NLG = left_NLGK.sum(-1)
    best_NLGK = reference.future_rank_LGK(point) < count_NLG[..., None]
    overlap_NLG = (left_NLGK & best_NLGK).sum(-1) / count_NLG
    return overlap_NLG.expand(engine.num_sets, -1, -1)


def _influence(delta_NLHQD: torch.Tensor, outcome: Outcome, reference: Reference) -> torch.Tensor:
    """Return ``Measures.influence_NLGPR`` of the rows that were read."""
    gradient_LPHQD = reference.influence(outcome.rows.start, outcome.rows.stop)
    groups = reference.layer.num_kv_heads
    return torch.einsum(
        "nlgmqd,lpgmqd->nlgpq",
        delta_NLHQD.unflatten(2, (groups, -1)),
        gradient_LPHQD.unflatten(2, (groups, -1)),
    )


def _plain(
    layer: LayerSpec, stays_NLGK: torch.Tensor, full: FullRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mass and KL where rows read all that is held, as it was written.

    Kept weights are then a / (mass + sink's share), so that KL(pruned || full) = -ln of that.
    """
    weights_LHQK = full.weights_LHQK[..., : stays_NLGK.shape[-1]]
    packed_LGXK = weights_LHQK.unflatten(1, (stays_NLGK.shape[2], -1)).flatten(2, 3)
    mass_LGXN = packed_LGXK @ stays_NLGK.permute(1, 2, 3, 0).to(packed_LGXK)
    mass_LHQN = mass_LGXN.unflatten(2, (-1, weights_LHQK.shape[-2])).flatten(1, 2)
    mass_NLHQ = mass_LHQN.permute(3, 0, 1, 2)
    return mass_NLHQ, minus_log(mass_NLHQ, sink_share(layer, weights_LHQK))


def _chosen(
    layer: LayerSpec, outcome: Outcome, full: FullRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mass and KL where rows choose what they read, or it is not as it was written."""
    pruned_LGNMQK = outcome.weights_LGNMQK
    weights_LHQK = full.weights_LHQK[..., : pruned_LGNMQK.shape[-1]]
    full_LG1MQK = weights_LHQK.unflatten(1, (pruned_LGNMQK.shape[1], 1, -1))
    seen_LGN1QK = outcome.seen_NLGQK.permute(1, 2, 0, 3, 4)[:, :, :, None]
    tiny = torch.finfo(pruned_LGNMQK.dtype).tiny
    logs = pruned_LGNMQK.clamp(min=tiny).log() - full_LG1MQK.clamp(min=tiny).log()
    mass_NLHQ = to_heads((full_LG1MQK * seen_LGN1QK).sum(-1))
    kl_NLHQ = to_heads((pruned_LGNMQK * logs).sum(-1))
    if layer.sinks is not None:
        pruned_NLHQ = (1 - to_heads(pruned_LGNMQK.sum(-1))).clamp(min=tiny)
        rest_LHQ = (1 - weights_LHQK.sum(-1)).clamp(min=tiny)
        kl_NLHQ = kl_NLHQ + pruned_NLHQ * (pruned_NLHQ / rest_LHQ).log()
    return mass_NLHQ, kl_NLHQ.clamp(min=0)
