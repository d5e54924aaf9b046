"""The reader of safetensors files against safetensors' own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tracekit.errors import TraceError
from tracekit.measure.tensors import to_torch
from tracekit.trace.open_folder import open_folder
from tracekit.trace.weights import Weights

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in (("a", (3, 5)), ("b.c", (7,)))}
    save_file(tensors, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    weights = Weights(open_folder(tmp_path))
    assert weights.names == {"a", "b.c"}
    for name, tensor in tensors.items():
        data, kind = weights.read(name)
        assert kind == str(dtype).removeprefix("torch.")
        assert torch.equal(to_torch(data, kind), tensor)


def test_a_trace_without_weights_has_no_names(tmp_path: Path) -> None:
    assert Weights(open_folder(tmp_path)).names == frozenset()


@pytest.mark.parametrize("content", [b"", b"head", b"\xff" * 20, b"\x04" + bytes(7) + b"nope"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"weights\.safetensors (ends after|is damaged)"):
        _ = Weights(open_folder(tmp_path)).names


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceError, match="ends after"):
        Weights(open_folder(tmp_path)).read("a")
