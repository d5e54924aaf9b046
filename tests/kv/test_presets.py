"""What every preset must do, whichever scorer serves it; a new scorer is tested by being there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kv.cases import SEED, make_case
from tracekit.kv.policy import PRESETS, parse
from tracekit.kv.replay import replay
from tracekit.kv.scorer import SCORERS

NAMES = PRESETS.names()
POINT = 30
SPECS = {
    "plain": {},
    "one head": {"groups": 1, "group_size": 1},
    "sliding": {"window": 11},
    "sinks": {"sinks": (0.5, -1.0, 2.0, 0.0)},
    "softcap": {"softcap": 4.0},
    "ties": {"whole": True},
    "zeros": {"spread": 0.0},
    "large": {"spread": 100.0},
}


def family(name):
    policy = parse(name)
    kept = (0.1, 0.4, 0.8, 1.0)
    return [policy.with_kept(one) for one in kept] if policy.scorer.evicts else [policy]


def run(case, name, seed=SEED, layers=None):
    return replay(
        family(name),
        case.reference,
        layers=layers or case.layers,
        spans=case.spans(prompt_end=POINT),
        seed=seed,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_preset_keeps_its_budget_and_gives_finite_measures(name, spec):
    case = make_case(rows=48, **SPECS[spec])
    result = run(case, name)
    for n, policy in enumerate(family(name)):
        for t in policy.schedule.decisions(POINT, case.num_rows):
            held_LG = (result.evicted_at_NLGT[n, :, :, :t] > t)[..., -(case.layer.window or t) :]
            budget = max(1, policy.kept.of(t))
            assert (held_LG.sum(-1) <= max(budget, 1)).all()
            assert (held_LG.sum(-1) >= 1).all()
    for values in (result.error_sq_NLHR, result.cosine_NLHR, result.mass_kept_NLHR):
        assert np.isfinite(values).all()
    assert (result.held_NLGR >= 1).all()
    assert (result.held_NLGR <= result.full_R).all()
    assert result.mass_kept_NLHR.max() <= 1 + 1e-9
    scale = 1 + result.norm_sq_LHR.max()
    assert (result.error_sq_NLHR[-1] / scale).max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_gives_the_same_bits_twice(name):
    case = make_case(rows=40)
    one, two = run(case, name), run(case, name)
    np.testing.assert_array_equal(one.evicted_at_NLGT, two.evicted_at_NLGT)
    np.testing.assert_array_equal(one.error_sq_NLHR, two.error_sq_NLHR)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_alone_is_treated_as_in_its_stack(name):
    case = make_case(rows=40, layers=3)
    together = run(case, name)
    for at, number in enumerate(case.layers):
        part = type(case)(
            case.layer,
            *(a[at : at + 1] for a in (case.query_LHTD, case.key_LGTD, case.value_LGTD)),
        )
        alone = run(part, name, layers=[number])
        np.testing.assert_array_equal(together.evicted_at_NLGT[:, [at]], alone.evicted_at_NLGT)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_read_back_from_its_texts(name):
    policy = family(name)[0]
    assert parse(policy.text) == policy
    assert policy.family == name


@pytest.mark.parametrize("name", SCORERS.names())
def test_a_scorer_serves_a_preset_and_says_in_a_sentence_what_it_does(name):
    scorer = SCORERS.get(name)
    assert scorer.presets
    assert (scorer.__doc__ or "").split("\n\n")[0].endswith(".")
    assert scorer.state_bytes_per_entry >= 0
