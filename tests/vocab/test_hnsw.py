"""Graph search: what it finds is in the order of the logits, and its cost is what faiss counted."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tests.vocab.cases import make_case
from tracekit.errors import UsageError
from tracekit.measure.head import Head
from tracekit.spec import HeadSpec
from tracekit.vocab.blocks import BLOCK_NUMBERS
from tracekit.vocab.estimators.hnsw import Hnsw

faiss = pytest.importorskip("faiss")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 23), st.integers(1, 40), st.booleans())
def test_what_is_found_is_in_the_order_of_the_logits(
    seed: int, limit: int, ef: int, has_bias: bool
) -> None:
    case = make_case(seed, has_bias=has_bias)
    logits = np.array(case.logits())
    found = case.candidates(Hnsw(m=8, ef=ef), limit)
    for row, ids in zip(case.scored_S.tolist(), found, strict=True):
        assert 1 <= len(ids) <= min(limit, ef)
        assert len(set(ids)) == len(ids)
        assert (np.diff(logits[row][ids]) <= 1e-4).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_search_that_keeps_all_tokens_finds_the_order_of_the_logits(has_bias: bool) -> None:
    case = make_case(3, has_bias=has_bias)
    logits = case.logits()
    wanted = [slow.order(logits[row]) for row in case.scored_S.tolist()]
    assert case.candidates(Hnsw(ef=23), 23) == wanted


@pytest.mark.parametrize("length", [1e-12, 1e12])
def test_the_length_of_a_state_changes_nothing(length: float) -> None:
    case = make_case(4)
    scaled = case.but(own=case.own.but(hidden_TE=case.hidden_TE * length))
    assert scaled.candidates(Hnsw(ef=8), 8) == case.candidates(Hnsw(ef=8), 8)


def test_masked_tokens_are_not_found() -> None:
    case = make_case(5, has_bias=True)
    bias_V = torch.zeros(23)
    bias_V[::2] = -torch.inf
    masked = case.but(head=Head(case.head.weight_VE, bias_V, case.head.spec))
    for ids in masked.candidates(Hnsw(), 23):
        assert sorted(ids) == list(range(1, 23, 2))


def test_larger_sets_than_a_search_keeps_hold_what_it_found() -> None:
    case = make_case(6)
    small = case.candidates(Hnsw(ef=5), 5)
    assert case.candidates(Hnsw(ef=5), 20) == small
    assert [ids[:2] for ids in small] == case.candidates(Hnsw(ef=5), 2)


def test_the_graph_and_its_cost_do_not_depend_on_threads_or_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, costs = [], []
    for threads, block in ((1, BLOCK_NUMBERS), (4, 60)):
        monkeypatch.setattr("tracekit.vocab.blocks.BLOCK_NUMBERS", block)
        before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(threads)
        try:
            case = make_case(7, width=600, size=8)
            found = case.candidates(Hnsw(m=4, ef=20), 20)
            results.append(found)
            costs += [row["bytes"] for row in case.evaluate([Hnsw(m=4, ef=20)], [5, 20])]
            assert faiss.omp_get_max_threads() == threads
        finally:
            faiss.omp_set_num_threads(before)
    assert results[0] == results[1]
    assert costs == pytest.approx([costs[0]] * 4, rel=1e-12)


def test_the_cost_is_that_of_the_distances_that_were_taken() -> None:
    case = make_case(8, width=600, size=8)
    small, large = case.evaluate([Hnsw(m=4, ef=20)], [5, 20])
    distances = small["macs"] / 8
    assert 20 <= distances < 600
    assert small["macs"] == large["macs"]
    assert small["bytes"] > distances * 9 * 4


def test_a_head_without_open_tokens_has_no_candidates() -> None:
    spec = HeadSpec(num_rows=23, hidden_size=6, has_bias=True)
    graph = Hnsw()._build(Head(torch.ones(23, 6), torch.full((23,), -torch.inf), spec))
    assert len(graph.ids_X) == 0


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UsageError, match=r"pip install 'tracekit\[hnsw\]'"):
        make_case(9).candidates(Hnsw(), 5)
