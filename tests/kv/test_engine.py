from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.kv.cases import KEPT, POLICIES, SEED, Case, cases, make_case
from tracekit.errors import UsageError
from tracekit.kv.engine import NEVER, Engine
from tracekit.kv.policy import Policy, parse
from tracekit.kv.scorer import Needs, Scorer
from tracekit.measure.attention import logits_HQK, outputs_HQD, visible_QK, weights_HQK


def family(text, kept):
    policy = parse(text)
    return [policy] if policy.kept is not None else [policy.with_kept(one) for one in kept]


def rows(case: Case, start: int, end: int):
    arrays = (case.query_LHTD, case.key_LGTD, case.value_LGTD)
    return [torch.tensor(array[:, :, start:end]) for array in arrays]


def run(case: Case, policies, point: int, *, step: int | None = None):
    """Absorb up to the point, then read (in steps) and decide; return outputs, sets and engine."""
    engine = Engine(case.layer, case.layers, policies, SEED)
    for start in range(0, point, step or point):
        engine.absorb(*rows(case, start, min(point, start + (step or point))))
    decisions = policies[0].schedule.decisions(point, case.num_rows)
    outputs, held = [], []
    for t in range(point, case.num_rows):
        if t in decisions:
            engine.decide()
            held.append((t, engine.held_NLGK.clone()))
        outputs.append(engine.read(*rows(case, t, t + 1)))
    return torch.cat(outputs, dim=-2), held, engine


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_one_row_at_a_time_equals_blocks(case, text, kept, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = family(text, kept)
    outputs, _, slow = run(case, policies, point, step=1)
    fast = Engine(case.layer, case.layers, policies, SEED)
    fast.absorb(*rows(case, 0, point))
    stops = [*policies[0].schedule.decisions(point, case.num_rows), case.num_rows]
    blocks = []
    for start, end in pairwise(stops):
        fast.decide()
        blocks.append(fast.read(*rows(case, start, end)))
    assert torch.equal(slow.evicted_at_NLGK, fast.evicted_at_NLGK)
    scale = 1 + np.abs(case.value_LGTD).max()
    torch.testing.assert_close(outputs / scale, torch.cat(blocks, -2) / scale, atol=1e-9, rtol=0)


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_kept_sets_only_shrink_and_hold_the_smaller_of_budget_and_available(case, text, kept, data):
    """Law 2."""
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = family(text, kept)
    engine = Engine(case.layer, case.layers, policies, SEED)
    engine.absorb(*rows(case, 0, point))
    decisions = policies[0].schedule.decisions(point, case.num_rows)
    for t in range(point, case.num_rows):
        if t in decisions:
            before = engine.held_NLGK
            num_evicted = engine.decide()
            after = engine.held_NLGK
            assert not (after & ~before).any()
            budget_N = torch.tensor([max(1, policy.kept.of(t)) for policy in policies])
            expected = torch.minimum(budget_N[:, None, None], before.sum(-1))
            assert torch.equal(after.sum(-1), expected)
            assert (after.sum(-1) >= 1).all()
            assert torch.equal(before.sum(-1) - after.sum(-1), num_evicted)
        engine.read(*rows(case, t, t + 1))


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=3), POLICIES, KEPT, st.data())
def test_rows_after_t_change_no_decision_up_to_t(case, text, kept, data):
    """Law 3, at the level of one layer's inputs."""
    point = data.draw(st.integers(1, case.num_rows - 2))
    seen = data.draw(st.integers(point, case.num_rows - 1))
    other = make_case(
        layers=len(case.layers),
        groups=case.layer.num_kv_heads,
        group_size=case.layer.group_size,
        rows=case.num_rows,
        size=case.layer.head_dim,
        seed=1,
        spread=5.0,
    )
    changed = Case(
        case.layer,
        *(
            np.concatenate([one[:, :, :seen], two[:, :, seen:]], axis=2)
            for one, two in (
                (case.query_LHTD, other.query_LHTD),
                (case.key_LGTD, other.key_LGTD),
                (case.value_LGTD, other.value_LGTD),
            )
        ),
    )
    policies = family(text, kept)
    for (t, one), (_, two) in zip(
        run(case, policies, point)[1], run(changed, policies, point)[1], strict=True
    ):
        if t <= seen:
            assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["random", "streaming", "window", "h2o", "snapkv", "knorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "spec", [{}, {"window": 9}, {"softcap": 3.0, "sinks": (1.0, 0.0, 2.0, 3.0)}]
)
def test_a_full_budget_gives_the_bits_of_full(name, dtype, spec):
    """Law 1."""
    case = make_case(rows=40, size=8, **spec)
    schedule = parse(name).schedule.text
    outputs = []
    for text in (f"{name}:kept=1.0", f"full:{schedule}"):
        engine = Engine(case.layer, case.layers, [parse(text)], SEED)
        inputs = [array.to(dtype) for array in rows(case, 0, 40)]
        engine.absorb(*(array[:, :, :20] for array in inputs))
        for start in range(20, 40, 5):
            assert engine.decide().sum() == 0
            outputs.append(engine.read(*(array[:, :, start : start + 5] for array in inputs)))
    assert torch.equal(torch.cat(outputs[:4], -2), torch.cat(outputs[4:], -2))


@pytest.mark.parametrize(
    "spec", [{}, {"window": 9}, {"softcap": 3.0, "sinks": (1.0, 0.0, 2.0, 3.0)}]
)
def test_the_full_cache_gives_plain_attention(spec):
    case = make_case(rows=30, size=8, **spec)
    query, key, value = rows(case, 0, 30)
    engine = Engine(case.layer, case.layers, [parse("full")], SEED)
    engine.absorb(*rows(case, 0, 10))
    output = engine.read(*rows(case, 10, 30))
    logits = logits_HQK(query, key, case.layer)
    hidden = ~visible_QK(case.layer, 30, 30, first_query=0)
    truth = outputs_HQD(weights_HQK(logits.masked_fill(hidden, -torch.inf), case.layer), value)
    torch.testing.assert_close(output[0], truth[..., 10:, :])


@settings(max_examples=40, deadline=None)
@given(cases(min_rows=3), KEPT)
def test_evicting_a_mass_moves_the_output_by_the_formula(case, kept):
    """Law 4: a' = a / (1 - m), error = m / (1 - m) (o - mean evicted value)."""
    assume(case.layer.sinks is None)
    last = case.num_rows - 1
    output_NLHQD, _, engine = run(case, family("random", kept), last)
    full_LHQD, _, _ = run(case, family("full", kept), last)
    query, key, value = rows(case, 0, last + 1)
    visible = visible_QK(case.layer, 1, last + 1, first_query=last)
    logits = logits_HQK(query[..., -1:, :], key, case.layer).masked_fill(~visible, -torch.inf)
    weights_LHK = weights_HQK(logits, case.layer)[..., 0, :]
    gone = (engine.evicted_at_NLGK != NEVER).repeat_interleave(case.layer.group_size, dim=2)
    evicted_NLHK = weights_LHK * gone
    mass = evicted_NLHK.sum(-1, keepdim=True)
    values_LHKD = value.repeat_interleave(case.layer.group_size, dim=1)
    mean = torch.einsum("nlhk,lhkd->nlhd", evicted_NLHK, values_LHKD) / mass.clamp_min(1e-300)
    full = full_LHQD[:, ..., 0, :]
    error = output_NLHQD[..., 0, :] - full
    formula = mass / (1 - mass) * (full - mean)
    # Above this mass 1 - m itself has lost its digits.
    sound = mass <= 1 - 1e-6
    scale = 1 + np.abs(case.value_LGTD).max()
    torch.testing.assert_close(
        torch.where(sound, error, 0) / scale,
        torch.where(sound, formula, 0) / scale,
        atol=1e-8,
        rtol=1e-6,
    )


def test_sums_are_of_rows_renormalised_over_what_was_kept():
    case = make_case(rows=12, spread=0.0)
    engine = Engine(case.layer, case.layers, [parse("h2o:kept=0.5,recent=1")], SEED)
    engine.absorb(*rows(case, 0, 8))
    engine.decide()
    before = engine._view(engine.held_NLGK).attention_sum_NLGK.clone()
    engine.read(*rows(case, 8, 9))
    after = engine._view(engine.held_NLGK).attention_sum_NLGK
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
        ("attention_sum_NLGK", "attention_sum"),
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
    engine = Engine(case.layer, case.layers, [policy], SEED)
    engine.absorb(*rows(case, 0, 8))
    with pytest.raises(UsageError, match=f"{need} without declaring it"):
        engine.decide()
