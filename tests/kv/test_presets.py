"""What every preset must do, whichever scorer serves it; a new scorer is tested by being there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kv.cases import (
    assert_kept_sets_shrink_to_the_budget,
    family,
    make_case,
    run_family,
    run_rows,
)
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.presets import PRESETS
from tracekit.kv.replay import Family, replay
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


KEPT = ("0.1", "0.4", "13tok", "1.0")


def run(case, name):
    return run_family(case, family(name, KEPT), POINT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", SPECS)
def test_a_full_budget_gives_the_bits_of_full(name, dtype, spec):
    """Law 1; that ``full`` is torch's attention is tested with the engine."""
    case, schedule = make_case(rows=48, **SPECS[spec]), parse(name).schedule.text
    (policy,) = family(name, ["1.0"])
    run, full = (run_rows(case, [one], POINT, dtype) for one in (policy, parse(f"full:{schedule}")))
    assert (run.engine.evicted_at_NLGK == NEVER).all()
    assert torch.equal(run.output_NLHRD, full.output_NLHRD)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS)
def test_kept_sets_shrink_to_the_smaller_of_budget_and_available(name, spec):
    """Law 2."""
    case = make_case(rows=48, **SPECS[spec])
    assert_kept_sets_shrink_to_the_budget(case, family(name, KEPT), POINT)


@pytest.mark.parametrize("name", [name for name in NAMES if parse(name).causal])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seen", [POINT, POINT + 7])
def test_later_rows_change_no_decision(name, spec, seen):
    """Law 3, at the level of one layer's inputs; bounds that look ahead are exempt."""
    case = make_case(rows=48, **SPECS[spec])
    one, two = (run(each, name).evicted_at_NLGT for each in (case, case.with_noise_from(seen)))
    np.testing.assert_array_equal(
        np.where(one <= seen, one, NEVER), np.where(two <= seen, two, NEVER)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_preset_gives_finite_measures_in_their_range(name, spec):
    result = run(make_case(rows=48, **SPECS[spec]), name)
    for values in (
        result.measures.error_sq_NLHR,
        result.measures.cosine_NLHR,
        result.measures.mass_kept_NLHR,
    ):
        assert np.isfinite(values).all()
    assert (result.measures.held_NLGR >= 1).all()
    assert (result.measures.held_NLGR <= result.full_R).all()
    assert result.measures.mass_kept_NLHR.min() >= 0
    assert result.measures.mass_kept_NLHR.max() <= 1 + 1e-9
    assert np.abs(result.measures.cosine_NLHR).max() <= 1 + 1e-9
    scale = 1 + result.measures.norm_sq_LHR.max()
    assert (result.measures.error_sq_NLHR[-1] / scale).max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_gives_the_same_bits_twice(name):
    case = make_case(rows=40)
    one, two = run(case, name), run(case, name)
    np.testing.assert_array_equal(one.evicted_at_NLGT, two.evicted_at_NLGT)
    np.testing.assert_array_equal(one.measures.error_sq_NLHR, two.measures.error_sq_NLHR)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_alone_is_treated_as_in_its_stack(name):
    case = make_case(rows=40, layers=3)
    if not family(name, KEPT)[0].layers.is_uniform:
        pytest.skip("its budget looks at all layers")
    together = run(case, name)
    for at, number in enumerate(case.layers):
        part = case.part(at)
        setting = replace(part.setting(POINT), layers=(number,), cache=case.cache)
        policies = tuple(family(name, KEPT))
        alone = replay([Family(policies)], part.reference, setting)[0]
        np.testing.assert_array_equal(together.evicted_at_NLGT[:, [at]], alone.evicted_at_NLGT)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_read_back_from_its_texts(name):
    policy = family(name, KEPT)[0]
    assert parse(policy.text) == policy
    assert policy.family == name


@pytest.mark.parametrize("name", SCORERS.names())
def test_a_scorer_serves_a_preset_and_says_in_a_sentence_what_it_does(name):
    scorer = SCORERS.get(name)
    assert scorer.presets
    assert (scorer.__doc__ or "").split("\n\n")[0].endswith(".")
    assert scorer().state_bytes(4) >= 0


def test_presets_that_share_a_scorer_each_say_what_is_their_own():
    entries = [PRESETS.get(name) for name in NAMES]
    said = [entry.preset.what or (entry.scorer.__doc__ or "").split("\n\n")[0] for entry in entries]
    assert len(set(said)) == len(said)
    for entry in entries:
        assert not entry.preset.what.endswith(".")
