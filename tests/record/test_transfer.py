from __future__ import annotations

import numpy as np
import pytest
import torch

from tracekit.record.transfer import Transfer

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_arrive_bit_for_bit_with_the_name_of_their_type(
    device: str, dtype: torch.dtype
) -> None:
    sent = torch.arange(24).reshape(2, 3, 4).to(dtype).to(device)
    arrival = Transfer().fetch({"a": sent, "b": sent[:, 1:]})
    assert arrival.num_bytes == sent.nbytes + sent[:, 1:].nbytes
    arrays = arrival.arrays()
    for name, wanted in (("a", sent), ("b", sent[:, 1:])):
        array, kind = arrays[name]
        assert kind == str(dtype).removeprefix("torch.")
        back = torch.from_numpy(np.array(array))
        back = back.view(torch.bfloat16) if dtype == torch.bfloat16 else back
        assert torch.equal(back, wanted.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_buffer_may_be_written_over_as_soon_as_it_was_fetched() -> None:
    buffer = torch.zeros(64, 1 << 16, device="cuda")
    transfer, arrivals = Transfer(), []
    for number in range(16):
        buffer.fill_(number)
        arrivals.append(transfer.fetch({"a": buffer[:, ::2]}))
    for number, arrival in enumerate(arrivals):
        array, _ = arrival.arrays()["a"]
        assert (array == number).all()
