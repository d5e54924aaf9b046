"""Rows over gathered entries are rows over masked ones, and counts follow from the history."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.cases import KEPT, POLICIES, allot, cases, family, make_case, make_engine
from tracekit.kv import gathered as module
from tracekit.kv.engine import NEVER
from tracekit.kv.entries import count_entries, entries_of_history
from tracekit.kv.gathered import NOWHERE, gathered


@settings(max_examples=60, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_rows_over_what_is_held_are_rows_over_masked_entries(case, text, kept, data):
    policies = family(text, kept)[:1]
    point = data.draw(st.integers(1, case.num_rows - 1))
    every = data.draw(st.integers(1, 9))
    spans, schedule = case.spans(prompt_end=point), policies[0].schedule
    decisions = schedule.decisions(point, spans) if schedule.point(spans) == point else (point,)
    stops = sorted({*decisions, *range(decisions[0], case.num_rows, every), case.num_rows})
    usual = {"allotment": allot(case, policies, point)}
    slow, fast = (make_engine(case, policies, **usual) for _ in range(2))
    for engine in (slow, fast):
        engine.absorb(*case.rows(0, stops[0]))
    for start, end in pairwise(stops):
        if start in decisions:
            slow.decide()
            fast.decide()
        rows = case.rows(start, end)
        output = torch.cat([output for output, _ in slow.read(*rows)], dim=-2)[0]
        scale = 1 + abs(case.value_LGTD).max()
        torch.testing.assert_close(fast.attend(*rows) / scale, output / scale, atol=1e-9, rtol=0)
        for one, state in slow.accumulated().items():
            torch.testing.assert_close(fast.accumulated()[one], state, atol=1e-8, rtol=0)
    assert torch.equal(slow.evicted_at_NLGK, fast.evicted_at_NLGK)


@settings(max_examples=60, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_entries_at_each_row_follow_from_the_history(case, text, kept, data):
    policies = family(text, kept)
    point = data.draw(st.integers(1, case.num_rows - 1))
    engine = make_engine(case, policies, allotment=allot(case, policies, point))
    engine.absorb(*case.rows(0, point))
    held = []
    for start, end in pairwise([*range(point, case.num_rows, 5), case.num_rows]):
        engine.decide()
        for _, outcome in engine.read(*case.rows(start, end)):
            counts = count_entries(engine, outcome)
            assert torch.equal(counts.held_NLGR, counts.read_NLGR)
            held.append(counts.held_NLGR.expand(len(policies), -1, -1, -1))
    num_rows = case.num_rows - point
    found = entries_of_history(engine.evicted_at_NLGK, case.layer, num_rows)
    assert torch.equal(found.held_NLGR, torch.cat(held, dim=-1))


@pytest.mark.parametrize("rows", [1, 10_000])
def test_heads_of_unequal_numbers_leave_places_empty(rows):
    case = make_case(layers=1, groups=2, group_size=1, rows=6)
    held_LGK = torch.tensor([[[1, 0, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0]]], dtype=torch.bool)
    _, key, value = case.rows(0, 6)
    entries = gathered(key, value, held_LGK, (2, rows))
    there = entries.position_LGC < NOWHERE
    assert there.sum(-1).tolist() == [[3, 1]]
    assert entries.position_LGC[there].tolist() == [0, 2, 5, 3]
    assert torch.equal(entries.key_LGCD[0, 1][there[0, 1]], key[0, 1, [3]])
    assert entries.key_LGCD.shape[2] == (6 if rows == 1 else 3)


def test_alibi_knows_the_positions_of_gathered_keys(monkeypatch):
    monkeypatch.setattr(module, "COPY_COST", 0)
    case = make_case(rows=12, alibi=(0.5, 0.25, 0.1, 0.02))
    policies = family("knorm:recent=2", ["0.4"])
    slow, fast = (make_engine(case, policies) for _ in range(2))
    for engine in (slow, fast):
        engine.absorb(*case.rows(0, 8))
        engine.decide()
    output = torch.cat([output for output, _ in slow.read(*case.rows(8, 12))], dim=-2)[0]
    torch.testing.assert_close(fast.attend(*case.rows(8, 12)), output, atol=1e-12, rtol=0)


def test_an_entry_counts_until_the_row_before_it_leaves():
    evicted_at = torch.tensor([[[[NEVER, 3, NEVER, NEVER, 5, NEVER]]]])
    layer = make_case(rows=6, layers=1, groups=1, group_size=1).layer
    found = entries_of_history(evicted_at, layer, 4)
    by_hand = [
        sum(e > t and k <= t for k, e in enumerate(evicted_at.flatten())) for t in range(2, 6)
    ]
    assert found.held_NLGR.flatten().tolist() == by_hand
    windowed = entries_of_history(evicted_at, replace(layer, window=2, kind="sliding"), 1)
    assert windowed.held_NLGR.flatten().tolist() == [1]
