"""What is measured at each scored row, and the numbers that it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.kv.reference import Reference
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
    influence_NLGPR
        Pruned - full attention output times the gradient of each of P probes there, summed over a
        KV head's query heads: what the row contributes to what ``measure.influence`` squares. 0
        before the first row that has gradients; P = 0 if there are no probes.
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
    influence_NLGPR: A


SHARED = ("norm_sq_LHR", "projected_norm_sq_LXR")
"""Measures of the full cache, the same for all policies."""


def overlap(
    reference: Reference,
    point: int,
    rows: range,
    read: Callable[[int], torch.Tensor],
    shape: torch.Size,
) -> torch.Tensor:
    """Return ``Measures.overlap_NLGR`` of some rows, NaN except at ``Reference.samples``.

    Parameters
    ----------
    reference
        The recorded rows.
    point
        The first scored row of all.
    rows
        Positions of the rows.
    read
        From q to what the q-th of them reads, bool [N, L, G, K], at least up to its own entry.
    shape
        (N, L, G).
    """
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
    """Return squared norms after the output projection: of KV heads' parts, then of the sum.

    Parameters
    ----------
    vector_NLHQD
        Attention outputs, or their differences.
    reference
        Has the projections, or None.

    Returns
    -------
    Tensor
        [N, L, G + 1, Q]; [N, L, 0, Q] without projections.
    """
    num_sets, num_layers, _, num_rows, _ = vector_NLHQD.shape
    if reference.projection_LEX is None:
        return vector_NLHQD.new_zeros(num_sets, num_layers, 0, num_rows)
    groups = reference.layer.num_kv_heads
    part_LGEX = reference.projection_LEX.unflatten(-1, (groups, -1)).transpose(1, 2)
    grouped_NLGQX = vector_NLHQD.unflatten(2, (groups, -1)).transpose(3, 4).flatten(4)
    projected_NLGQE = grouped_NLGQX @ part_LGEX.transpose(-1, -2)
    heads_NLGQ = projected_NLGQE.square().sum(-1)
    return torch.cat([heads_NLGQ, projected_NLGQE.sum(2).square().sum(-1)[:, :, None]], dim=2)


def count_seen(entries_NLGK: torch.Tensor, layer: LayerSpec, num_rows: int) -> torch.Tensor:
    """Return how many of some entries each of the last rows sees, int64 [N, L, G, Q].

    Parameters
    ----------
    entries_NLGK
        bool, up to the last row's own.
    layer
        Its window.
    num_rows
        Q.
    """
    total_NLGK = entries_NLGK.cumsum(-1)
    if layer.window is None:
        return total_NLGK[..., -num_rows:]
    left_NLGK = pad(total_NLGK, (layer.window, 0))[..., : -layer.window]
    return (total_NLGK - left_NLGK)[..., -num_rows:]


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

    Parameters
    ----------
    size_sq, full_size_sq, error_sq
        Squared L2 norms of the pruned output, the full one, and pruned - full; shapes that
        broadcast.
    """
    dot = (size_sq + full_size_sq - error_sq) / 2
    norms = size_sq.sqrt() * full_size_sq.sqrt()
    both_zero = (size_sq == 0) & (full_size_sq == 0)
    return (dot / norms).clamp(-1, 1).where(norms > 0, both_zero.to(dot))
