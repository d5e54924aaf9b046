from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.record import strips as module
from tracekit.record.strips import Strips


@given(
    steps=st.integers(0, 20),
    batch_size=st.integers(1, 3),
    block_rows=st.integers(1, 5),
    half=st.booleans(),
)
def test_rows_come_back_by_tensor_in_the_order_of_steps(
    steps: int, batch_size: int, block_rows: int, half: bool
) -> None:
    shapes = {(0, "query"): 4, (1, "query"): 4, (1, "key"): 2, (3, "query"): 8}
    put: dict[tuple[int, str], list[torch.Tensor]] = {key: [] for key in shapes}
    strips = Strips()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ROWS", block_rows)
        for _ in range(steps):
            for key, heads in shapes.items():
                rows = torch.randn(batch_size, 1, heads, 6).transpose(1, 2)
                rows = rows.bfloat16() if half and key[0] == 1 else rows
                put[key].append(rows.clone())
                strips.put(*key, rows)
            strips.end_step()
    wanted = {key: torch.cat(rows, dim=2) for key, rows in put.items() if rows}
    assert strips.num_bytes == sum(rows.nbytes for rows in wanted.values())
    taken = strips.take()
    assert set(taken) == set(wanted)
    for key, rows in wanted.items():
        assert torch.equal(torch.cat(taken[key], dim=2), rows)
    assert strips.num_bytes == 0
    assert strips.take() == {}
