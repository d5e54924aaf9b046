"""Divergences by their sums, and the closed forms of pruning by direct computation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.measure.divergence import jsd_nats, jsd_of_mass_nats, kl_nats, neg_log_mass_nats

INF = math.inf
LOGITS = st.lists(st.floats(-20, 20), min_size=2, max_size=12)


@settings(max_examples=100, deadline=None)
@given(LOGITS, st.data())
def test_pruning_to_a_set_is_told_by_its_mass_alone(
    logits: list[float], data: st.DataObject
) -> None:
    logp_V = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    inside = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    if not any(inside):
        inside[0] = True
    is_in_V = torch.tensor(inside)
    log_mass = logp_V[is_in_V].logsumexp(0)
    logq_V = (logp_V - log_mass).masked_fill(~is_in_V, -INF)
    mass = float(log_mass.exp())
    log_tail = logp_V[~is_in_V].logsumexp(0)

    total_variation = 0.5 * float((logp_V.exp() - logq_V.exp()).abs().sum())
    assert total_variation == pytest.approx(1 - mass, abs=1e-12)
    neg_log_mass = float(neg_log_mass_nats(log_mass, log_tail))
    assert float(kl_nats(logq_V, logp_V)) == pytest.approx(neg_log_mass, abs=1e-12)
    assert neg_log_mass == pytest.approx(-math.log(mass), abs=1e-12)
    jsd = float(jsd_nats(logp_V, logq_V))
    assert jsd == pytest.approx(float(jsd_of_mass_nats(log_mass.exp())), abs=1e-12)
    assert -1e-12 <= jsd <= math.log(2) + 1e-12
    assert torch.isinf(kl_nats(logp_V, logq_V)) or all(inside)


def test_the_mass_keeps_its_precision_close_to_one_and_to_zero() -> None:
    tail = 1e-30
    masses_2 = torch.tensor([0.0, math.log(tail)], dtype=torch.float64)
    found = neg_log_mass_nats(masses_2, masses_2.flip(0))
    assert float(found[0]) == pytest.approx(tail, rel=1e-12)
    assert float(found[1]) == pytest.approx(-math.log(tail), rel=1e-12)


def test_no_tail_is_no_loss_and_no_mass_is_all_of_it() -> None:
    log_mass, log_tail = torch.tensor([0.0, -INF]), torch.tensor([-INF, 0.0])
    assert neg_log_mass_nats(log_mass, log_tail).tolist() == [0.0, INF]
    ends = jsd_of_mass_nats(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends.tolist() == pytest.approx([math.log(2), 0.0])


def test_kl_is_the_sum_over_tokens_that_are_there() -> None:
    p, q = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
    logp, logq = torch.tensor([p]).log(), torch.tensor([q]).log()
    assert kl_nats(logp, logq).tolist() == pytest.approx([math.log(2)])
    assert kl_nats(logq, logp).tolist() == [INF]
    assert kl_nats(logp, logp).tolist() == [0.0]
    assert kl_nats(logp, logq).dtype == torch.float64
