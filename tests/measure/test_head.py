"""The head against the formula of its spec, and its low-rank copies against numpy's SVD."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tracekit.errors import TraceError
from tracekit.measure import head as head_module
from tracekit.measure.head import Head
from tracekit.spec import HeadSpec

if TYPE_CHECKING:
    from pathlib import Path

SPEC = HeadSpec(num_rows=12, hidden_size=5)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_logits_are_the_soft_capped_scaled_product_with_bias() -> None:
    spec = HeadSpec(num_rows=12, hidden_size=5, has_bias=True, scale=0.25, softcap=1.5)
    weight_VE, bias_V, hidden_TE = random(12, 5), random(12, seed=1), random(3, 5, seed=2)
    product_TV = hidden_TE.numpy() @ weight_VE.numpy().T + bias_V.numpy()
    wanted_TV = 1.5 * np.tanh(0.25 * product_TV / 1.5)
    logits_TV = Head(weight_VE, bias_V, spec).logits(hidden_TE)
    np.testing.assert_allclose(logits_TV.numpy(), wanted_TV, rtol=1e-5, atol=1e-6)


def test_the_product_is_taken_in_the_type_of_the_weight_and_then_widened() -> None:
    weight_VE, hidden_TE = random(12, 5).bfloat16(), random(3, 5, seed=2)
    logits_TV = Head(weight_VE, None, SPEC).logits(hidden_TE)
    assert logits_TV.dtype == torch.float32
    assert torch.equal(logits_TV, (hidden_TE.bfloat16() @ weight_VE.T).float())


def test_scale_and_cap_leave_the_weight_and_the_states_alone() -> None:
    spec = HeadSpec(num_rows=12, hidden_size=5, scale=3.0, softcap=2.0)
    weight_VE, hidden_TE = random(12, 5), random(3, 5, seed=2)
    before = weight_VE.clone(), hidden_TE.clone()
    Head(weight_VE, None, spec).logits(hidden_TE)
    assert torch.equal(weight_VE, before[0])
    assert torch.equal(hidden_TE, before[1])


def test_capping_is_done_in_place_and_keeps_the_order() -> None:
    spec = HeadSpec(num_rows=12, hidden_size=5, scale=0.25, softcap=1.5)
    head, logits_TV = Head(random(12, 5), None, spec), random(3, 12, seed=3) * 4
    order_TV = logits_TV.argsort(1)
    wanted_TV = 1.5 * torch.tanh(0.25 * logits_TV / 1.5)
    capped_TV = head.capped(logits_TV)
    assert capped_TV is logits_TV
    torch.testing.assert_close(capped_TV, wanted_TV)
    assert torch.equal(capped_TV.argsort(1), order_TV)


def test_a_head_without_scale_and_cap_changes_no_logit() -> None:
    logits_TV = random(3, 12)
    assert torch.equal(Head(random(12, 5), None, SPEC).capped(logits_TV.clone()), logits_TV)


def test_heads_keep_what_was_made_of_them_apart() -> None:
    one, other = (Head(random(12, 5, seed=seed), None, SPEC) for seed in (0, 1))
    assert one.memo.get("key", lambda: "one") == "one"
    assert other.memo.get("key", lambda: "other") == "other"
    assert not torch.equal(one.truncated(2).weight_VR, other.truncated(2).weight_VR)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_stored_head_is_the_head_that_was_stored(tmp_path: Path, has_bias: bool) -> None:
    spec = HeadSpec(num_rows=12, hidden_size=5, has_bias=has_bias)
    tensors = {"head.weight": random(12, 5).bfloat16(), "norm.weight": random(5)}
    if has_bias:
        tensors["head.bias"] = random(12, seed=1).bfloat16()
    save_file(tensors, tmp_path / "weights.safetensors")
    head = Head.load(tmp_path / "weights.safetensors", spec)
    hidden_TE = random(3, 5, seed=2)
    direct = Head(tensors["head.weight"], tensors.get("head.bias"), spec)
    assert torch.equal(head.logits(hidden_TE), direct.logits(hidden_TE))


def test_a_file_without_a_head_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(TraceError, match="cannot be read"):
        Head.load(path, SPEC)
    path.write_bytes(b"\x07broken")
    with pytest.raises(TraceError, match="cannot be read"):
        Head.load(path, SPEC)
    save_file({"norm.weight": random(5)}, path)
    with pytest.raises(TraceError, match=r"no head\.weight"):
        Head.load(path, SPEC)


def test_a_head_of_another_shape_than_its_spec_is_refused() -> None:
    with pytest.raises(TraceError, match=r"\[11, 5\]"):
        Head(random(11, 5), None, SPEC)
    with pytest.raises(TraceError, match="with a bias"):
        Head(random(12, 5), random(12), SPEC)


def test_bytes_and_multiply_adds_count_the_weight_and_the_bias() -> None:
    spec = HeadSpec(num_rows=12, hidden_size=5, has_bias=True)
    head = Head(random(12, 5).bfloat16(), random(12).bfloat16(), spec)
    assert head.macs == 60
    assert head.bytes_per_row == 12
    assert head.num_bytes == 144


@pytest.mark.parametrize("rank", [1, 3, 5, 64])
def test_a_truncated_head_is_the_truncated_svd(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "BLOCK_NUMBERS", 20)
    head = Head(random(12, 5), None, SPEC)
    copy = head.truncated(rank)
    assert copy.weight_VR.shape == (12, min(rank, 5))
    u, s, v = np.linalg.svd(head.weight_VE.double().numpy(), full_matrices=False)
    wanted_VE = u[:, :rank] @ np.diag(s[:rank]) @ v[:rank]
    found_VE = copy.weight_VR @ copy.axes_ER.T
    np.testing.assert_allclose(found_VE.numpy(), wanted_VE, atol=1e-5)


def test_a_truncated_head_is_computed_once() -> None:
    head = Head(random(12, 5), None, SPEC)
    assert head.truncated(2) is head.truncated(2)
    assert head.truncated(5) is head.truncated(7)
    assert head.truncated(2) is not head.truncated(3)


def test_a_truncated_half_precision_head_stays_in_half_precision() -> None:
    copy = Head(random(12, 5).bfloat16(), None, SPEC).truncated(2)
    assert copy.weight_VR.dtype == copy.axes_ER.dtype == torch.bfloat16
