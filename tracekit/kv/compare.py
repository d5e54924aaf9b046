"""Attention of some rows under a policy against the same rows under the full cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from tracekit.kv.engine import NEVER
from tracekit.measure.attention import visible_QK

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.kv.engine import Engine, Outcome
    from tracekit.kv.reference import FullRows, Reference
    from tracekit.spec import LayerSpec


A = TypeVar("A")
"""Tensors while rows are read, numpy arrays in the end."""


class Measures(NamedTuple, Generic[A]):
    """What is measured at each of R rows, rows last; axes N, L, then G or H.

    Parameters
    ----------
    held_NLGR
        Entries held, the row's own included (int64).
    read_NLGR
        Entries of these that the row reads.
    fetched_NLGR
        Entries of those read that came from the slow tier; 0 without a tier. The others are hits.
    closed_NLGR
        Entries of those held that are stored transformed.
    error_sq_NLHR, norm_sq_LHR
        Squared L2 norm of pruned - full attention output, and of the full one.
    cosine_NLHR
        Cosine of the two; 1 where both are zero, 0 where one is.
    mass_kept_NLHR
        Attention that the full cache gives to the entries that are read; sink logits' share is in
        neither.
    row_kl_NLHR
        KL(pruned || full) of the row's attention, sink logits included, in nats.
    overlap_NLGR
        Of as many keys as the row reads, the part of the most attended ones that it reads; NaN
        except at ``Reference.samples``.
    projected_sq_NLXR, projected_norm_sq_LXR
        Squared norms like ``error_sq`` and ``norm_sq`` after the output projection, for each KV
        head's part of it and, last, for the layer; X = 0 if there is no projection.
    """

    held_NLGR: A
    read_NLGR: A
    fetched_NLGR: A
    closed_NLGR: A
    error_sq_NLHR: A
    norm_sq_LHR: A
    cosine_NLHR: A
    mass_kept_NLHR: A
    row_kl_NLHR: A
    overlap_NLGR: A
    projected_sq_NLXR: A
    projected_norm_sq_LXR: A


SHARED = ("norm_sq_LHR", "projected_norm_sq_LXR")
"""Measures of the full cache, the same for all policies."""


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
    num_rows, num_keys = output_NLHQD.shape[-2], outcome.weights_LGNMQK.shape[-1]
    first, device = num_keys - num_rows, output_NLHQD.device
    seen_QK = visible_QK(engine.layer, num_rows, num_keys, first_query=first, device=device)
    stays_NLGK = engine.evicted_at_NLGK[..., :num_keys] == NEVER
    held_NLGR = count_seen(stays_NLGK, seen_QK)
    if engine.policy.is_plain:
        read_NLGR = held_NLGR
        mass_kept_NLHR, row_kl_NLHR = _plain(engine.layer, stays_NLGK, full)
    else:
        read_NLGR = outcome.seen_NLGQK.sum(-1)
        mass_kept_NLHR, row_kl_NLHR = _chosen(engine.layer, outcome, full)
    num_sets = len(output_NLHQD)
    error_sq_NLHQ = (output_NLHQD - full.output_LHQD).square().sum(-1)
    norm_sq_LHQ = full.output_LHQD.square().sum(-1)
    return Measures(
        held_NLGR=held_NLGR.expand(num_sets, -1, -1, -1),
        read_NLGR=read_NLGR.expand(num_sets, -1, -1, -1),
        fetched_NLGR=outcome.fetched_NLGQ.expand(num_sets, -1, -1, -1),
        closed_NLGR=count_seen(stays_NLGK & engine.closed_LGK[..., :num_keys], seen_QK),
        error_sq_NLHR=error_sq_NLHQ,
        norm_sq_LHR=norm_sq_LHQ,
        cosine_NLHR=cosine_of(output_NLHQD.square().sum(-1), norm_sq_LHQ, error_sq_NLHQ),
        mass_kept_NLHR=mass_kept_NLHR,
        row_kl_NLHR=row_kl_NLHR,
        overlap_NLGR=overlap(
            reference,
            point,
            range(first, num_keys),
            lambda q: outcome.seen_NLGQK[..., q, :],
            outcome.seen_NLGQK.shape[:3],
        ).expand(num_sets, -1, -1, -1),
        projected_sq_NLXR=projected_sq(output_NLHQD - full.output_LHQD, reference),
        projected_norm_sq_LXR=projected_sq(full.output_LHQD[None], reference)[0],
    )


def overlap(
    reference: Reference,
    point: int,
    rows: range,
    read: Callable[[int], torch.Tensor],
    shape: torch.Size,
) -> torch.Tensor:
    """Return ``Measures.overlap_NLGR`` of some rows; ``read`` gives what the q-th of them reads."""
    samples = reference.samples(point)
    columns = []
    for q, row in enumerate(rows):
        if row in samples:
            read_NLGK = read(q)[..., : row + 1]
            count_NLG = read_NLGK.sum(-1)
            best_NLGK = reference.rank_LGK(row) < count_NLG[..., None]
            columns.append((q, (read_NLGK & best_NLGK).sum(-1) / count_NLG))
    overlap_NLGR = reference.key_LGTD.new_full((*shape, len(rows)), torch.nan)
    for q, column_NLG in columns:
        overlap_NLGR[..., q] = column_NLG
    return overlap_NLGR


def projected_sq(vector_NLHQD: torch.Tensor, reference: Reference) -> torch.Tensor:
    """Return squared norms after the output projection: of KV heads' parts, then of the sum."""
    num_sets, num_layers, _, num_rows, _ = vector_NLHQD.shape
    if reference.projection_LEX is None:
        return vector_NLHQD.new_zeros(num_sets, num_layers, 0, num_rows)
    groups = reference.layer.num_kv_heads
    part_LGEX = reference.projection_LEX.unflatten(-1, (groups, -1)).transpose(1, 2)
    grouped_NLGQX = vector_NLHQD.unflatten(2, (groups, -1)).transpose(3, 4).flatten(4)
    projected_NLGQE = grouped_NLGQX @ part_LGEX.transpose(-1, -2)
    heads_NLGQ = projected_NLGQE.square().sum(-1)
    return torch.cat([heads_NLGQ, projected_NLGQE.sum(2).square().sum(-1)[:, :, None]], dim=2)


def count_seen(entries_NLGK: torch.Tensor, seen_QK: torch.Tensor) -> torch.Tensor:
    """Return how many of some entries each row sees, int64 [N, L, G, Q]."""
    return (entries_NLGK.float() @ seen_QK.T.float()).long()


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
    mass_NLHQ = _to_heads((full_LG1MQK * seen_LGN1QK).sum(-1))
    kl_NLHQ = _to_heads((pruned_LGNMQK * logs).sum(-1))
    if layer.sinks is not None:
        pruned_NLHQ = (1 - _to_heads(pruned_LGNMQK.sum(-1))).clamp(min=tiny)
        rest_LHQ = (1 - weights_LHQK.sum(-1)).clamp(min=tiny)
        kl_NLHQ = kl_NLHQ + pruned_NLHQ * (pruned_NLHQ / rest_LHQ).log()
    return mass_NLHQ, kl_NLHQ.clamp(min=0)


def _to_heads(array_LGNMQ: torch.Tensor) -> torch.Tensor:
    return array_LGNMQ.permute(2, 0, 1, 3, 4).flatten(2, 3)


def sink_share(layer: LayerSpec, weights_LHQK: torch.Tensor) -> torch.Tensor:
    """Return what sink logits take of each row, [L, H, Q] or a single 0."""
    if layer.sinks is None:
        return weights_LHQK.new_zeros(())
    return (1 - weights_LHQK.sum(-1)).clamp(min=0)


def minus_log(mass_NLHQ: torch.Tensor, sink_LHQ: torch.Tensor) -> torch.Tensor:
    """Return -ln(mass + sink), at least 0, finite."""
    total = (mass_NLHQ + sink_LHQ).clamp(min=torch.finfo(mass_NLHQ.dtype).tiny, max=1.0)
    return -total.log()


def cosine_of(
    size_sq: torch.Tensor, full_size_sq: torch.Tensor, error_sq: torch.Tensor
) -> torch.Tensor:
    """Return the cosine of two outputs from squared norms of both and of their difference.

    1 where both are zero, 0 where one is.
    """
    dot = (size_sq + full_size_sq - error_sq) / 2
    norms = size_sq.sqrt() * full_size_sq.sqrt()
    both_zero = (size_sq == 0) & (full_size_sq == 0)
    return (dot / norms).clamp(-1, 1).where(norms > 0, both_zero.to(dot))
