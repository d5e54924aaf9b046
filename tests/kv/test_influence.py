"""Influence probes in the engine: what rows measure of them, and the score made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kv.cases import Case, make_case, make_engine, run_family
from tracekit.errors import InputError, UsageError
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.reference import Reference
from tracekit.kv.scorer import Needs
from tracekit.measure.influence import block_sums, foretell

POINT = 20


def reference_from(case: Case, row: int) -> Reference:
    """Return the case with probes from a row on."""
    names = ("query_LHTD", "key_LGTD", "value_LGTD")
    tensors = dict(zip(names, case.rows(0, case.num_rows), strict=True))
    return Reference(
        **tensors,
        layer=case.layer,
        rope=case.rope,
        influence_LPHRD=case.gradients[..., row:, :],
        influence_from=row,
    )


def without_probes(case: Case) -> Case:
    return replace(case, influence_LPHTD=None)


@pytest.mark.parametrize("text", ["h2o:kept=0.4,every=8", "tova:kept=0.4", "quest:read=0.3,page=4"])
def test_rows_before_the_first_gradient_measure_nothing_and_the_others_the_same(text):
    case = make_case(rows=50)
    whole = run_family(case, [parse(text)], POINT).measures.influence_NLGPR
    late = run_family(case, [parse(text)], POINT, reference_from(case, 33)).measures
    np.testing.assert_array_equal(late.influence_NLGPR[..., : 33 - POINT], 0)
    np.testing.assert_allclose(
        late.influence_NLGPR[..., 33 - POINT :], whole[..., 33 - POINT :], atol=1e-12
    )
    assert np.abs(whole).min(-1).max() > 0


@pytest.mark.parametrize("text", ["h2o:kept=0.4", "tova:kept=0.4"])
def test_without_probes_there_is_nothing_to_measure(text):
    case = without_probes(make_case(rows=40))
    found = run_family(case, [parse(text)], POINT).measures.influence_NLGPR
    assert found.shape == (1, 2, 2, 0, 20)


@pytest.mark.parametrize("every", ["at=prompt", "every=1"])
def test_a_full_cache_has_no_effect_at_all(every):
    case = make_case(rows=40)
    found = run_family(case, [parse(f"knorm:kept=1.0,{every}")], POINT)
    assert np.abs(found.measures.influence_NLGPR).max() < 1e-12


@pytest.mark.parametrize("spec", [{}, {"window": 14}, {"sinks": (0.0, 2.0, 1.0, -1.0)}])
def test_the_score_of_a_key_is_the_kl_that_its_eviction_alone_is_foretold_to_make(spec):
    case = make_case(rows=60, layers=1, **spec)
    num_seen = min(POINT, case.layer.window or POINT)
    policy = parse(f"influence:kept={num_seen - 1}tok,sinks=0,recent=0")
    engine = make_engine(case, [policy])
    engine.absorb(*case.rows(0, POINT))
    harm_GK = engine.score()[0, 0].where(engine.held_NLGK[0, 0], torch.inf)
    result = run_family(case, [policy], POINT)
    assert ((result.evicted_at_NLGT != NEVER).sum(-1) == 1).all()
    for group in range(2):
        sums_PB = block_sums(result.measures.influence_NLGPR[0, 0, group])
        told = foretell([sums_PB], num_scored=case.num_rows - POINT)
        least = float(harm_GK[group].min())
        assert 2 * told.kl_nats * (case.num_rows - POINT) == pytest.approx(least, rel=1e-6)


def test_a_decision_before_the_first_gradient_is_refused_and_says_from_where_to_record():
    case, policy = make_case(rows=40), parse("influence:kept=0.5")
    with pytest.raises(UsageError, match=r"begin at row 25 .* evicts at 20: .* --probe-from 20"):
        run_family(case, [policy], POINT, reference_from(case, 25))
    assert run_family(case, [policy], POINT, reference_from(case, POINT)) is not None


def test_a_policy_that_scores_probes_is_refused_where_there_are_none():
    case = without_probes(make_case(rows=40))
    with pytest.raises(UsageError, match="--capture influence"):
        run_family(case, [parse("influence:kept=0.5")], POINT)


def test_a_rule_sees_no_probes_and_no_later_rows_that_it_does_not_declare():
    future = make_case().reference.future
    assert future.declared(Needs()) is None
    assert future.declared(Needs(future=True)).num_probes == 0
    assert future.declared(Needs(future=True, influence=True)) is future


def test_probes_of_another_sequence_are_refused():
    case = make_case(rows=40)
    with pytest.raises(InputError, match="end at row 39 and the recorded rows at 40"):
        replace(case, influence_LPHTD=case.gradients[..., :39, :]).reference.num_rows  # noqa: B018


def test_the_score_of_a_key_does_not_depend_on_which_layers_stand_beside_it():
    case, policy = make_case(rows=40, layers=3), parse("influence:kept=0.5")
    together = make_engine(case, [policy])
    together.absorb(*case.rows(0, POINT))
    for at in range(3):
        alone = make_engine(case.part(at), [policy])
        alone.absorb(*case.part(at).rows(0, POINT))
        assert torch.equal(alone.score()[:, 0], together.score()[:, at])
