from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.kv.cases import (
    KEPT,
    POLICIES,
    allot,
    assert_kept_sets_shrink_to_the_budget,
    cases,
    family,
    make_case,
    make_engine,
    run_rows,
    run_slow,
)
from tracekit.errors import UsageError
from tracekit.kv.accumulate import Received
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.policy import Policy
from tracekit.kv.scorer import Needs, Scorer


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_one_row_at_a_time_equals_blocks(case, text, kept, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = family(text, kept)
    slow = run_rows(case, policies, point)
    fast = make_engine(case, policies, allotment=allot(case, policies, point))
    stops = [*policies[0].schedule.decisions(point, case.spans()), case.num_rows]
    fast.absorb(*case.rows(0, stops[0]))
    blocks = []
    for start, end in pairwise(stops):
        fast.decide()
        blocks += [output for output, _ in fast.read(*case.rows(start, end))]
    assert torch.equal(slow.engine.evicted_at_NLGK, fast.evicted_at_NLGK)
    scale = 1 + np.abs(case.value_LGTD).max()
    torch.testing.assert_close(
        slow.output_NLHRD / scale,
        torch.cat(blocks, -2)[..., point - case.num_rows :, :] / scale,
        atol=1e-9,
        rtol=0,
    )


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_kept_sets_only_shrink_and_hold_the_smaller_of_budget_and_available(case, text, kept, data):
    """Law 2."""
    point = data.draw(st.integers(1, case.num_rows - 1))
    assert_kept_sets_shrink_to_the_budget(case, family(text, kept), point)


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=3), POLICIES.filter(lambda text: parse(text).causal), KEPT, st.data())
def test_rows_from_t_on_change_no_decision_up_to_t(case, text, kept, data):
    """Law 3, at the level of one layer's inputs; bounds that look ahead are exempt."""
    point = data.draw(st.integers(1, case.num_rows - 2))
    seen = data.draw(st.integers(point, case.num_rows - 1))
    policies = family(text, kept)
    one, two = (
        run_rows(each, policies, point).engine.evicted_at_NLGK
        for each in (case, case.with_noise_from(seen))
    )
    assert torch.equal(one.where(one <= seen, NEVER), two.where(two <= seen, NEVER))


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_outputs_and_kept_sets_equal_those_of_the_slow_twin(case, text, kept, data):
    """Law 10, at the level of the state machine."""
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = family(text, kept)
    run = run_rows(case, policies, point)
    scale = 1 + np.abs(case.value_LGTD).max()
    for n, policy in enumerate(policies):
        for at in range(len(case.layers)):
            slow = run_slow(case, at, policy, point)
            found = run.output_NLHRD[n, at].numpy()
            np.testing.assert_allclose(found / scale, slow.output_HRD / scale, atol=1e-9, rtol=0)
            np.testing.assert_array_equal(run.engine.evicted_at_NLGK[n, at], slow.evicted_at_GT)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("spec", [{}, {"window": 9}, {"sinks": (1.0, 0.0, 2.0, 3.0)}])
def test_the_full_cache_gives_the_attention_of_torch(dtype, atol, spec):
    """Law 1; a sink is a key of zeros with a value of zeros and a bias."""
    case = make_case(rows=30, size=8, spread=2.0, **spec)
    output = run_rows(case, [parse("full")], 10, dtype).output_NLHRD[0]
    query, key, value = case.rows(0, 30, dtype)
    query_Q1, key_1K = torch.arange(30)[:, None], torch.arange(30)[None]
    seen = (key_1K <= query_Q1) & (key_1K > query_Q1 - (case.layer.window or 30))
    bias = torch.zeros(1, 4, 30, 30, dtype=dtype).masked_fill(~seen, -torch.inf)
    sink = torch.tensor(case.layer.sinks or [-torch.inf] * 4, dtype=dtype)
    bias = torch.cat([bias, sink[:, None, None].expand(1, 4, 30, 1)], dim=-1)
    truth = functional.scaled_dot_product_attention(
        query,
        functional.pad(key, (0, 0, 0, 1)),
        functional.pad(value, (0, 0, 0, 1)),
        attn_mask=bias,
        scale=case.layer.scale,
        enable_gqa=True,
    )
    torch.testing.assert_close(output, truth[..., 10:, :], atol=atol, rtol=0)


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=3), POLICIES, KEPT)
def test_evicting_a_mass_moves_a_row_by_the_formula(case, text, kept):
    """Law 4: a' = a / (1 - m), error = m / (1 - m) (o - mean evicted value); sinks or not."""
    last, needs = case.num_rows - 1, parse(text).scorer.needs
    assume(not needs.values and not needs.future)  # other values, other decisions
    run = run_rows(case, family(text, kept), last)
    # Values that name their key make outputs of weights.
    names = np.broadcast_to(np.eye(last + 1), (*case.key_LGTD.shape[:3], last + 1))
    named = replace(case, value_LGTD=names)
    weights_NLHK = run_rows(named, family(text, kept), last).output_NLHRD[..., 0, :]
    full_NLHK = run_rows(named, [parse("full")], last).output_NLHRD[..., 0, :]
    gone = (run.engine.evicted_at_NLGK != NEVER).repeat_interleave(case.layer.group_size, dim=2)
    evicted_NLHK = full_NLHK * gone
    mass = evicted_NLHK.sum(-1, keepdim=True)
    sound = mass <= 1 - 1e-6  # above, 1 - m itself has lost its digits
    left = torch.where(sound, 1 - mass, 1)
    assert (weights_NLHK[gone.expand_as(weights_NLHK)] == 0).all()
    torch.testing.assert_close(
        torch.where(sound, weights_NLHK, 0),
        torch.where(sound, full_NLHK.where(~gone, 0) / left, 0),
        atol=1e-9,
        rtol=0,
    )
    values_LHKD = case.rows(0, last + 1)[2].repeat_interleave(case.layer.group_size, dim=1)
    evicted_sum = torch.einsum("nlhk,lhkd->nlhd", evicted_NLHK, values_LHKD)
    full = torch.einsum("nlhk,lhkd->nlhd", full_NLHK, values_LHKD)
    formula = mass / left * (full - evicted_sum / mass.clamp_min(1e-300))
    error = run.output_NLHRD[..., 0, :] - full
    scale = 1 + np.abs(case.value_LGTD).max()
    torch.testing.assert_close(
        torch.where(sound, error, 0) / scale,
        torch.where(sound, formula, 0) / scale,
        atol=1e-8,
        rtol=0,
    )


def test_sums_are_of_rows_renormalised_over_what_was_kept():
    case = make_case(rows=12, spread=0.0)
    engine = make_engine(case, [parse("h2o:kept=0.5,recent=1")])
    engine.absorb(*case.rows(0, 8))
    engine.decide()
    before = engine.accumulated()[Received()].clone()
    list(engine.read(*case.rows(8, 9)))
    after = engine.accumulated()[Received()]
    # All logits are equal: the row spreads evenly over the 4 kept keys and itself.
    gained = after[..., :8] - before
    np.testing.assert_allclose(gained[engine.held_NLGK[..., :8]], 0.2)
    np.testing.assert_allclose(gained[~engine.held_NLGK[..., :8]], 0.0)


class Curious(Scorer):
    """Reads what it did not declare."""

    def __init__(self, attribute):
        object.__setattr__(self, "attribute", attribute)

    @property
    def needs(self):
        return Needs()

    def score(self, view):
        return getattr(view, self.attribute)


@pytest.mark.parametrize(
    ("attribute", "need"),
    [
        ("key_LGKD", "keys"),
        ("value_LGKD", "values"),
        ("query_LHKD", "queries"),
        ("later", "future"),
        ("last_attention_NLHQK", "last_queries"),
    ],
)
def test_a_scorer_cannot_read_what_it_did_not_declare(attribute, need):
    case, usual = make_case(), parse("window:kept=0.5")
    policy = Policy(
        name="window",
        scorer=Curious(attribute),
        protection=usual.protection,
        schedule=usual.schedule,
        kept=usual.kept,
    )
    engine = make_engine(case, [policy])
    engine.absorb(*case.rows(0, 8))
    with pytest.raises(UsageError, match=f"{need} without declaring it"):
        engine.decide()
