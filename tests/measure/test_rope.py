"""Rotary embeddings against loops over pairs, and against transformers' own."""

from __future__ import annotations

import cmath
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tracekit.errors import UsageError
from tracekit.measure.rope import average, rotate, undo
from tracekit.spec import LENGTH_DEPENDENT, RopeLayout, RopeSpec

LAYOUTS: tuple[RopeLayout, ...] = get_args(RopeLayout)


def make_rope(num_pairs: int, layout: RopeLayout | None = "halves", **spec: Any) -> RopeSpec:
    inv_freq = tuple(1e4 ** -(f / num_pairs) for f in range(num_pairs))
    return RopeSpec(kind="default", theta=1e4, inv_freq=inv_freq, layout=layout, **spec)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def slow(row: list[float], position: float, rope: RopeSpec, factor: float = 1.0) -> list[float]:
    """Return one row turned by a number of positions, pair by pair."""
    num_pairs, turned = len(rope.inv_freq), list(row)
    for f, inv_freq in enumerate(rope.inv_freq):
        a, b = (f, f + num_pairs) if rope.layout == "halves" else (2 * f, 2 * f + 1)
        z = complex(row[a], row[b]) * cmath.exp(1j * position * inv_freq) * factor
        turned[a], turned[b] = z.real, z.imag
    return turned


def encode(x_KD: torch.Tensor, positions: list[float], rope: RopeSpec) -> torch.Tensor:
    """Return rows as a model caches them, attention scaling included."""
    s = rope.attention_scaling
    rows = [slow(row, p, rope, s) for row, p in zip(x_KD.tolist(), positions, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def ropes(draw: st.DrawFn) -> tuple[RopeSpec, int]:
    """Return a rope and the size of a head that it turns, wholly or in part."""
    num_pairs = draw(st.integers(1, 4))
    rope = make_rope(
        num_pairs,
        draw(st.sampled_from(LAYOUTS)),
        attention_scaling=draw(st.sampled_from([1.0, 1.35])),
    )
    return rope, 2 * num_pairs + draw(st.sampled_from([0, 1, 4]))


shifts = st.lists(st.integers(-100_000, 100_000) | st.floats(-50, 50), min_size=1, max_size=5)


@given(ropes(), shifts)
def test_rows_turn_as_the_loop_turns_them(case: tuple[RopeSpec, int], shift: list[float]) -> None:
    rope, size = case
    x_KD = random(len(shift), size)
    wanted = [slow(row, p, rope) for row, p in zip(x_KD.tolist(), shift, strict=True)]
    turned = rotate(x_KD, torch.tensor(shift, dtype=torch.float64), rope)
    torch.testing.assert_close(turned, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)
    assert torch.equal(turned[:, 2 * len(rope.inv_freq) :], x_KD[:, 2 * len(rope.inv_freq) :])


@given(ropes(), shifts)
def test_undoing_gives_the_rows_before(case: tuple[RopeSpec, int], positions: list[float]) -> None:
    rope, size = case
    x_KD = random(len(positions), size)
    encoded = encode(x_KD, positions, rope)
    position_K = torch.tensor(positions, dtype=torch.float64)
    torch.testing.assert_close(undo(encoded, position_K, rope), x_KD, rtol=0, atol=1e-9)


@given(ropes(), shifts, st.integers(-1000, 1000))
def test_moving_encoded_rows_is_encoding_them_elsewhere(
    case: tuple[RopeSpec, int], positions: list[float], shift: int
) -> None:
    rope, size = case
    x_KD = random(len(positions), size)
    moved = rotate(encode(x_KD, positions, rope), shift, rope)
    wanted = encode(x_KD, [p + shift for p in positions], rope)
    torch.testing.assert_close(moved, wanted, rtol=0, atol=1e-9)


@given(ropes(), st.integers(-100_000, 100_000))
def test_products_do_not_see_a_common_shift(case: tuple[RopeSpec, int], shift: int) -> None:
    rope, size = case
    query, key = random(3, size), random(5, size, seed=1)
    moved = rotate(query, shift, rope) @ rotate(key, shift, rope).T
    torch.testing.assert_close(moved, query @ key.T, rtol=0, atol=1e-9)


@given(ropes(), st.integers(0, 50), st.integers(1, 20))
def test_the_mean_rotation_is_the_mean_of_rotation_matrices(
    case: tuple[RopeSpec, int], first: int, count: int
) -> None:
    rope, size = case
    mean_D, root_DD = random(size), random(size, size, seed=1)
    eye = torch.eye(size, dtype=torch.float64)
    # Row i of the encoded identity is the image of axis i: a column of the rotation matrix.
    matrices = [encode(eye, [p] * size, rope).T for p in range(first, first + count)]
    matrix_DD = torch.stack(matrices).mean(dim=0)
    mean, covariance = average(
        mean_D, root_DD @ root_DD.T, rope, first_position=first, num_positions=count
    )
    torch.testing.assert_close(mean, matrix_DD @ mean_D, rtol=0, atol=1e-9)
    wanted = matrix_DD @ root_DD @ root_DD.T @ matrix_DD.T
    torch.testing.assert_close(covariance, wanted, rtol=0, atol=1e-9)


def test_leading_axes_are_carried_along() -> None:
    rope = make_rope(3)
    mean, covariance = random(2, 4, 8), random(2, 4, 8, 8)
    many = average(mean, covariance, rope, first_position=7, num_positions=5)
    one = average(mean[1, 2], covariance[1, 2], rope, first_position=7, num_positions=5)
    torch.testing.assert_close((many[0][1, 2], many[1][1, 2]), one)
    x_GKD, shift_GK = random(2, 5, 8), torch.arange(10).reshape(2, 5)
    assert torch.equal(rotate(x_GKD, shift_GK, rope)[1], rotate(x_GKD[1], shift_GK[1], rope))
    assert rotate(x_GKD[0], shift_GK, rope).shape == (2, 5, 8)


def test_transformers_turns_alike() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=512)
    rotary = LlamaRotaryEmbedding(config)
    inv_freq = tuple(rotary.inv_freq.double().tolist())
    rope = RopeSpec(kind="default", theta=1e4, inv_freq=inv_freq, layout="halves")
    query, position_K = random(1, 2, 9, 8).float(), torch.arange(300, 309)
    cos, sin = rotary(query, position_K[None])
    encoded, _ = apply_rotary_pos_emb(query, query, cos, sin)
    torch.testing.assert_close(rotate(query, position_K, rope), encoded, rtol=0, atol=1e-4)
    torch.testing.assert_close(undo(encoded, position_K, rope), query, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_are_wide_and_inputs_are_left_alone(dtype: torch.dtype) -> None:
    x_KD = random(4, 8).to(dtype)
    before, wide = x_KD.clone(), torch.float64 if dtype == torch.float64 else torch.float32
    rope, position_K = make_rope(4, attention_scaling=1.5), torch.arange(4)
    assert rotate(x_KD, position_K, rope).dtype == undo(x_KD, position_K, rope).dtype == wide
    assert torch.equal(x_KD, before)
    torch.testing.assert_close(rotate(x_KD, 0, rope), x_KD.to(wide))


def test_float32_rows_keep_their_digits_at_position_100_000() -> None:
    rope, x_KD = make_rope(4), random(3, 8)
    turned = rotate(x_KD.float(), 100_000, rope)
    torch.testing.assert_close(turned.double(), rotate(x_KD, 100_000, rope), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_ropes_that_change_with_the_length_are_refused(kind: str) -> None:
    rope = replace(make_rope(2), kind=kind)
    for turn in (rotate, undo):
        with pytest.raises(UsageError, match=f"under {kind} rotary embeddings cannot be turned"):
            turn(random(2, 4), 1, rope)


def test_a_rope_of_unknown_layout_is_refused() -> None:
    rope = make_rope(2, layout=None)
    with pytest.raises(UsageError, match="record it again with this version"):
        rotate(random(2, 4), 1, rope)
    with pytest.raises(UsageError, match="record it again with this version"):
        average(random(4), random(4, 4), rope, first_position=0, num_positions=1)
    with pytest.raises(UsageError, match="at least 1 position, not 0"):
        average(random(4), random(4, 4), make_rope(2), first_position=0, num_positions=0)
