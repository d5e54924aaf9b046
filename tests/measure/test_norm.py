"""The final norm offline, against a slow twin by loops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tracekit.errors import TraceError
from tracekit.measure.norm import Norm
from tracekit.spec import NormSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.spec import NormKind


def slow_norm(norm: Norm, hidden_TE: torch.Tensor) -> list[list[float]]:
    """Return the norm of each row, number by number, in float64."""
    spec, size = norm.spec, hidden_TE.shape[1]
    weight = [1.0] * size if norm.weight_E is None else norm.weight_E.tolist()
    bias = [0.0] * size if norm.bias_E is None else norm.bias_E.tolist()
    rows = []
    for state in hidden_TE.tolist():
        mean = sum(state) / size if spec.kind == "layer" else 0.0
        square = sum((number - mean) ** 2 for number in state) / size
        root = math.sqrt(square + spec.eps)
        rows.append(
            [
                (spec.weight_offset + w) * (number - mean) / root + b
                for number, w, b in zip(state, weight, bias, strict=True)
            ]
        )
    return rows


def norm_of(
    kind: NormKind, *, size: int, weight: bool = True, bias: bool = True, **spec: float
) -> Norm:
    return Norm(
        torch.randn(size) if weight else None,
        torch.randn(size) if bias else None,
        NormSpec(
            kind=kind,
            eps=spec.get("eps", 1e-5),
            weight_offset=spec.get("offset", 0.0) if weight else 0.0,
            has_weight=weight,
            has_bias=bias,
            rounds_first=bool(spec.get("rounds_first", 0)),
        ),
    )


@given(
    kind=st.sampled_from(["rms", "layer"]),
    eps=st.sampled_from([1e-12, 1e-6, 1e-2]),
    weight=st.booleans(),
    bias=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    size=st.integers(2, 9),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 9),
)
def test_a_norm_is_that_of_loops(
    kind: NormKind,
    eps: float,
    weight: bool,
    bias: bool,
    offset: float,
    size: int,
    scale: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    norm = norm_of(kind, size=size, weight=weight, bias=bias, eps=eps, offset=offset)
    hidden_TE = scale * torch.randn(3, size)
    wanted = torch.tensor(slow_norm(norm, hidden_TE))
    torch.testing.assert_close(norm.apply(hidden_TE), wanted, rtol=1e-4, atol=1e-4)


def test_one_row_is_normed_as_all_rows_are() -> None:
    norm = norm_of("rms", size=8)
    hidden_TE = torch.randn(4, 8)
    assert torch.equal(norm.apply(hidden_TE[2]), norm.apply(hidden_TE)[2])


@pytest.mark.parametrize("rounds_first", [0, 1])
def test_half_precision_rounds_where_the_module_does(rounds_first: int) -> None:
    torch.manual_seed(0)
    wide = norm_of("rms", size=64, bias=False, rounds_first=rounds_first)
    assert wide.weight_E is not None
    weight_E, hidden_TE = wide.weight_E.bfloat16(), torch.randn(5, 64).bfloat16()
    normal = hidden_TE.float()
    normal = normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + wide.spec.eps)
    by_hand = (
        weight_E * normal.bfloat16() if rounds_first else (weight_E.float() * normal).bfloat16()
    )
    assert torch.equal(Norm(weight_E, None, wide.spec).apply(hidden_TE), by_hand)


def test_states_that_were_stored_narrower_are_not_rounded_again() -> None:
    norm = norm_of("layer", size=8)
    assert norm.apply(torch.randn(2, 8).half()).dtype == torch.float32


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_is_loaded_as_it_was_stored(tmp_path: Path, weight: bool, bias: bool) -> None:
    norm = norm_of("layer", size=6, weight=weight, bias=bias)
    tensors = {
        "head.weight": torch.ones(3, 6),
        "norm.weight": norm.weight_E,
        "norm.bias": norm.bias_E,
    }
    path = tmp_path / "weights.safetensors"
    save_file({name: one for name, one in tensors.items() if one is not None}, path)
    hidden_TE = torch.randn(4, 6)
    assert torch.equal(Norm.load(path, norm.spec).apply(hidden_TE), norm.apply(hidden_TE))


def test_a_norm_that_is_not_there_or_not_the_one_of_the_spec_is_named(tmp_path: Path) -> None:
    spec = norm_of("rms", size=4, bias=False).spec
    with pytest.raises(TraceError, match=r"cannot be read .*--head store"):
        Norm.load(tmp_path / "none.safetensors", spec)
    path = tmp_path / "weights.safetensors"
    save_file({"head.weight": torch.ones(3, 4)}, path)
    with pytest.raises(
        TraceError, match=r"comes without weight and without bias, but .* with weight"
    ):
        Norm.load(path, spec)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(TraceError, match="cannot be read"):
        Norm.load(path, spec)
