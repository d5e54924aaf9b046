"""Rotary embeddings on recorded rows: turn them further, turn them back, average over positions.

The first 2 F numbers of a head are F pairs; at position p pair f is turned by p * inv_freq[f]
radians, and all of them are multiplied by the rope's attention scaling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracekit.errors import UsageError
from tracekit.measure.attention import as_wide
from tracekit.spec import LENGTH_DEPENDENT, UNREAD_ROPE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracekit.spec import RopeLayout, RopeSpec

_PLACES: Mapping[RopeLayout, Callable[[int], tuple[slice, slice]]] = {
    "halves": lambda count: (slice(count), slice(count, 2 * count)),
    "neighbours": lambda count: (slice(0, 2 * count, 2), slice(1, 2 * count, 2)),
}
"""Where the real and the imaginary parts of so many pairs stand in a head."""


def layout_of(rope: RopeSpec) -> RopeLayout:
    """Return the layout of a rope whose rotation follows from a position alone.

    Raises
    ------
    UsageError
        If its frequencies change with the length, or its layout was not recorded.
    """
    if rope.kind in LENGTH_DEPENDENT:
        msg = (
            f"rows under {rope.kind} rotary embeddings cannot be turned, because their frequencies "
            "change with the length of the sequence; use a policy that leaves rows as recorded."
        )
        raise UsageError(msg)
    if rope.kind == UNREAD_ROPE:
        msg = (
            "the rotary embedding of this model could not be read; use a policy that leaves rows as "
            "recorded."
        )
        raise UsageError(msg)
    if rope.layout is None:
        msg = (
            "the trace does not say which numbers of a head its rotary embedding pairs; record it "
            "again with this version of tracekit, or use a policy that leaves rows as recorded."
        )
        raise UsageError(msg)
    return rope.layout


def rotate(x_KD: torch.Tensor, shift_K: torch.Tensor | float, rope: RopeSpec) -> torch.Tensor:
    """Return rows as they would be at other positions.

    Parameters
    ----------
    x_KD
        Post-RoPE queries or keys [..., K, D].
    shift_K
        Positions by which each row moves, broadcastable to [..., K]; of any sign, fractions too.
    rope
        What turned the rows.

    Returns
    -------
    Tensor
        [..., K, D], float64 for float64 and float32 for all else. Angles are taken in float64, so
        no digit is lost far out; models take them in float32, which at position 100 000 is off by
        up to 0.004 radians.

    Raises
    ------
    UsageError
        If the rope cannot be turned (``layout_of``).
    """
    layout = layout_of(rope)
    return turn_pairs(x_KD, _unit_KF(shift_K, rope, x_KD.device), layout)


def undo(x_KD: torch.Tensor, position_K: torch.Tensor | float, rope: RopeSpec) -> torch.Tensor:
    """Return rows as they were before the rotary embedding.

    Parameters
    ----------
    x_KD
        Post-RoPE queries or keys [..., K, D].
    position_K
        Position of each row, broadcastable to [..., K].
    rope
        What turned the rows; its attention scaling is taken off the numbers that it turned.

    Returns
    -------
    Tensor
        [..., K, D], float64 for float64 and float32 for all else. Rows stored in half precision
        come back with its rounding.

    Raises
    ------
    UsageError
        If the rope cannot be turned (``layout_of``).
    """
    layout = layout_of(rope)
    back_KF = _unit_KF(position_K, rope, x_KD.device).conj() / rope.attention_scaling
    return turn_pairs(x_KD, back_KF, layout)


def average(
    mean_D: torch.Tensor,
    covariance_DD: torch.Tensor,
    rope: RopeSpec,
    *,
    first_position: int,
    num_positions: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and covariance of pre-RoPE rows under the mean rotation of coming positions.

    With R the mean of the rotation matrices of these positions, attention scaling included: R mu
    and R S R^T, as in Expected Attention (arXiv 2510.00636, as kvpress's
    ``ExpectedAttentionPress`` computes it).

    Parameters
    ----------
    mean_D
        Means mu [..., D].
    covariance_DD
        Covariances S [..., D, D].
    rope
        What will turn the rows.
    first_position, num_positions
        Positions that are averaged over: ``first_position`` and those after it, at least one.

    Returns
    -------
    tuple of Tensor
        [..., D] and [..., D, D], float64 for float64 and float32 for all else. kvpress averages
        matrices in the model's own type, and knows whole heads in halves only.

    Raises
    ------
    UsageError
        If the rope cannot be turned (``layout_of``), or there is no position.
    """
    layout = layout_of(rope)
    if num_positions < 1:
        msg = f"a mean rotation needs at least 1 position, not {num_positions}."
        raise UsageError(msg)
    position_K = torch.arange(first_position, first_position + num_positions, device=mean_D.device)
    factor_F = rope.attention_scaling * _unit_KF(position_K, rope, mean_D.device).mean(dim=0)
    # R acts on the rows of S, which gives S R^T, and then on its columns.
    half_DD = turn_pairs(covariance_DD, factor_F, layout)
    whole_DD = turn_pairs(half_DD.mT, factor_F, layout).mT
    return turn_pairs(mean_D, factor_F, layout), whole_DD


def turn_pairs(x_D: torch.Tensor, factor_F: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    """Return rows whose pairs, read as complex numbers, are multiplied by complex factors.

    Parameters
    ----------
    x_D
        Rows [..., D].
    factor_F
        Complex factors, broadcastable to [..., F]; D is at least 2 F.
    layout
        ``halves`` pairs the numbers (f, F + f), ``neighbours`` (2 f, 2 f + 1).

    Returns
    -------
    Tensor
        [..., D], float64 for float64 and float32 for all else; numbers after the first 2 F are
        those of ``x_D``.
    """
    real, imag = _PLACES[layout](factor_F.shape[-1])
    x_D = as_wide(x_D)
    cos_F, sin_F = factor_F.real.to(x_D.dtype), factor_F.imag.to(x_D.dtype)
    turned_D = x_D.expand(torch.broadcast_shapes(x_D.shape, (*factor_F.shape[:-1], 1))).clone()
    turned_D[..., real] = x_D[..., real] * cos_F - x_D[..., imag] * sin_F
    turned_D[..., imag] = x_D[..., imag] * cos_F + x_D[..., real] * sin_F
    return turned_D


def _unit_KF(
    position_K: torch.Tensor | float, rope: RopeSpec, device: torch.device
) -> torch.Tensor:
    """Return exp(i * position * inv_freq), complex128 [..., F], of positions [...]."""
    inv_freq_F = torch.tensor(rope.inv_freq, dtype=torch.float64, device=device)
    position_K = torch.as_tensor(position_K, dtype=torch.float64, device=device)
    angle_KF = position_K[..., None] * inv_freq_F
    return torch.polar(torch.ones_like(angle_KF), angle_KF)
