from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.record.buffer import BLOCK_ROWS, RowBuffer


@given(
    st.lists(
        st.sampled_from([1, 2, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 3]), min_size=1, max_size=8
    )
)
def test_rows_come_back_as_they_were_appended(sizes: list[int]) -> None:
    buffer = RowBuffer()
    parts = [torch.rand(2, size, 3) for size in sizes]
    for part in parts:
        buffer.append(part)
    assert buffer.num_rows == sum(sizes)
    torch.testing.assert_close(buffer.joined(), torch.cat(parts, dim=1), rtol=0, atol=0)
    torch.testing.assert_close(buffer.joined(), torch.cat(parts, dim=1), rtol=0, atol=0)


def test_rows_may_be_appended_after_they_were_joined() -> None:
    buffer = RowBuffer()
    one, other = torch.rand(5, 3), torch.rand(4, 3)
    buffer.append(one)
    buffer.joined()
    buffer.append(other)
    torch.testing.assert_close(buffer.joined(), torch.cat([one, other]), rtol=0, atol=0)
