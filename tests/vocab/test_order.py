"""Rankings put in order, against loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.vocab.order import first_of_each, packed


@st.composite
def rankings(draw: st.DrawFn) -> list[list[int]]:
    width = draw(st.integers(0, 8))
    row = st.lists(st.integers(-1, 6), min_size=width, max_size=width)
    return draw(st.lists(row, min_size=1, max_size=4))


def filled(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows]


@given(rankings(), st.randoms(use_true_random=False))
def test_packed_keeps_the_order_of_what_is_kept(rows: list[list[int]], rng: object) -> None:
    width = len(rows[0])
    keeps = [[rng.random() < 0.5 for _ in row] for row in rows]  # type: ignore[attr-defined]
    wanted = [
        [i for i, keep in zip(row, flags, strict=True) if keep]
        for row, flags in zip(rows, keeps, strict=True)
    ]
    ids_SK = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
    keeps_SK = torch.tensor(keeps, dtype=torch.bool).reshape(len(rows), width)
    assert packed(ids_SK, keeps_SK).tolist() == filled(wanted, width)


@given(rankings())
def test_first_of_each_passes_over_what_came_before(rows: list[list[int]]) -> None:
    width = len(rows[0])
    wanted = [[i for i in dict.fromkeys(row) if i >= 0] for row in rows]
    ids_SK = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
    assert first_of_each(ids_SK, 7).tolist() == filled(wanted, width)
