"""The context and its neighbours against the definition, and what they count as their cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_nearest as slow
from tests.vocab.cases import Case, make_case
from tracekit.errors import UsageError
from tracekit.measure import nearest
from tracekit.measure.head import Head
from tracekit.measure.nearest import NearestRows
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.estimator import parse_estimator
from tracekit.vocab.estimators import neighbours
from tracekit.vocab.estimators.neighbours import Neighbours, recent_first

SEEDS = st.integers(0, 10**6)


def whole_numbers(seed: int, num_rows: int) -> torch.Tensor:
    """Return rows of small whole numbers: many are alike, longer, opposite or zero."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 3, (num_rows, 3), generator=rng).float()


def with_rows(case: Case, rows_VE: torch.Tensor) -> Case:
    return case.but(head=Head(rows_VE, None, case.head.spec))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 15), st.integers(0, 20))
def test_nearest_rows_are_the_order_of_cosines_ties_by_lower_number(
    seed: int, num_rows: int, n: int
) -> None:
    rows_VE = whole_numbers(seed, num_rows)
    wanted = [slow.nearest(rows_VE.tolist(), own, n) for own in range(num_rows)]
    table = NearestRows(rows_VE, n)
    assert table.width == min(n, num_rows - 1)
    assert table.of(torch.arange(num_rows)).tolist() == wanted


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.lists(st.lists(st.integers(0, 14), min_size=1, max_size=4), max_size=5))
def test_nearest_rows_do_not_hang_on_what_is_asked_together(
    seed: int, asked: list[list[int]]
) -> None:
    rows_VE = whole_numbers(seed, 15)
    whole = NearestRows(rows_VE, 6).of(torch.arange(15))
    table = NearestRows(rows_VE, 6)
    for ids in asked:
        assert torch.equal(table.of(torch.tensor(ids)), whole[ids])


@pytest.mark.parametrize("name", ["BLOCK_NUMBERS", "WIDE_NUMBERS"])
def test_blocks_change_no_neighbour(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_VE = whole_numbers(1, 15)
    whole = NearestRows(rows_VE, 6).of(torch.arange(15))
    monkeypatch.setattr(nearest, name, 4)
    assert torch.equal(NearestRows(rows_VE, 6).of(torch.arange(15)), whole)


def test_a_row_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[list[int]] = []
    search = NearestRows._search

    def counting(self: NearestRows, ids_M: torch.Tensor) -> torch.Tensor:
        searched.append(ids_M.tolist())
        return search(self, ids_M)

    monkeypatch.setattr(NearestRows, "_search", counting)
    table = NearestRows(whole_numbers(0, 9), 2)
    assert table.of(torch.tensor([[3, 1], [3, 3]])).shape == (2, 2, 2)
    table.of(torch.tensor([1, 5, 3]))
    table.of(torch.tensor([3, 5]))
    assert searched == [[1, 3], [5]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_recent_first_is_the_order_of_last_use(tokens: list[int], data: Any) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1), min_size=1)))
    tokens = tokens[: rows[-1] + 1]
    ids_SM = recent_first(torch.tensor(tokens), torch.tensor(rows))
    wanted = [slow.recent(tokens[: row + 1]) for row in rows]
    assert [[i for i in row if i >= 0] for row in ids_SM.tolist()] == wanted
    assert ids_SM.shape[1] == max(map(len, wanted))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 23), st.integers(0, 30), st.sampled_from(["output", "input"]))
def test_neighbours_are_the_context_and_then_level_by_level(
    seed: int, limit: int, n: int, space: Any
) -> None:
    case = make_case(seed)
    rows_VE = case.head.weight_VE if space == "output" else case.embedding_VE
    tokens = case.token_ids_T.tolist()
    wanted = [
        slow.neighbours(tokens[: row + 1], rows_VE.tolist(), n)[:limit]
        for row in case.scored_S.tolist()
    ]
    assert case.candidates(Neighbours(n=n, space=space), limit) == wanted


def test_rows_that_are_all_alike_are_neighbours_by_id() -> None:
    case = with_rows(make_case(num_rows=1), torch.ones(23, 6))
    (ranked,) = case.candidates(Neighbours(n=3), 23)
    own = int(case.token_ids_T[0])
    assert ranked == [own, *[i for i in range(4) if i != own][:3]]


def test_no_neighbours_leave_the_context_alone() -> None:
    case = make_case(scored=[6])
    (ranked,) = case.candidates(Neighbours(n=0), 23)
    assert ranked == slow.recent(case.token_ids_T[:7].tolist())


def test_blocks_of_ids_change_no_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(5)
    whole = case.candidates(Neighbours(n=4), 23)
    monkeypatch.setattr(neighbours, "BLOCK_IDS", 1)
    assert case.candidates(Neighbours(n=4), 23) == whole


def test_blocks_of_steps_share_the_neighbours_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", 1)
    case = make_case(3)
    case.candidates(Neighbours(n=2), 23)
    key = ("neighbours", "output", 2)
    kept: NearestRows = case.head.memo.get(key, lambda: pytest.fail("made again"))
    assert kept._is_found_V.sum() == len(case.token_ids_T[: int(case.scored_S[-1]) + 1].unique())


def test_the_cost_is_the_ids_of_the_context_and_of_its_neighbours() -> None:
    case = make_case(scored=[2, 6])
    counts = [len(set(case.token_ids_T[: row + 1].tolist())) for row in (2, 6)]
    (cell,) = case.evaluate([Neighbours(n=5)], [4])
    assert cell["bytes"] == pytest.approx(4 * 6 * sum(counts) / 2)
    assert cell["macs"] == 0


def test_neighbours_below_none_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 0"):
        parse_estimator("neighbours:n=-1")
    assert parse_estimator("neighbours:n=0") == Neighbours(n=0)
