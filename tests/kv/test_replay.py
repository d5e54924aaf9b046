from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.cases import (
    KEPT,
    POLICIES,
    TEXTS,
    assert_like_slow,
    cases,
    family,
    make_case,
    make_engine,
    run_family,
)
from tracekit.errors import InputError, UsageError
from tracekit.kv import attend
from tracekit.kv.engine import NEVER
from tracekit.kv.measures import Measures
from tracekit.kv.parse import parse
from tracekit.kv.presets import PRESETS
from tracekit.kv.reference import Reference
from tracekit.kv.replay import Family, replay
from tracekit.kv.schedule import Spans
from tracekit.kv.step import step
from tracekit.kv.sweep import sweep

run = run_family


@settings(max_examples=150, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_a_replay_equals_its_slow_twin(case, text, kept, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = family(text, kept)
    result = run(case, policies, point)
    for n, policy in enumerate(policies if result is not None else ()):  # None: above its length
        assert_like_slow(case, policy, n, result)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("spec", [{}, {"window": 14, "softcap": 5.0}, {"sinks": (0.0, 2.0, 1.0)}])
def test_a_replay_of_a_longer_text_equals_its_slow_twin(text, spec):
    groups, group_size = (3, 1) if spec else (2, 3)
    case = make_case(rows=40, groups=groups, group_size=group_size, **spec)
    policies = family(text, ["0.25", "0.5", "9tok"])
    result = run(case, policies, 28)
    for n, policy in enumerate(policies):
        assert_like_slow(case, policy, n, result)


@settings(max_examples=30, deadline=None)
@given(cases(min_rows=2), POLICIES, KEPT, st.data())
def test_blocks_of_any_size_give_the_same(case, text, kept, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = family(text, kept)
    whole = run(case, policies, point)
    if whole is None:  # too short for ``above``
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "BLOCK_BYTES", data.draw(st.integers(1, 20_000)))
        blocks = run(case, policies, point)
    np.testing.assert_array_equal(blocks.evicted_at_NLGT, whole.evicted_at_NLGT)
    np.testing.assert_array_equal(blocks.measures.held_NLGR, whole.measures.held_NLGR)
    for n, policy in enumerate(policies):
        assert_like_slow(case, policy, n, blocks)


@pytest.mark.parametrize("text", ["random", "streaming", "h2o", "snapkv:window=4", "knorm"])
def test_several_kept_fractions_give_what_each_gives_alone(text):
    case = make_case(rows=30)
    policies = family(text, ["0.2", "11tok", "1.0"])
    together = run(case, policies, 16)
    for n, policy in enumerate(policies):
        alone = run(case, [policy], 16)
        np.testing.assert_array_equal(together.evicted_at_NLGT[n], alone.evicted_at_NLGT[0])
        np.testing.assert_allclose(
            together.measures.error_sq_NLHR[n], alone.measures.error_sq_NLHR[0], atol=1e-12
        )


def test_a_full_cache_makes_no_error_and_evicts_nothing():
    case = make_case(window=9, softcap=5.0)
    result = run(case, [parse("full")], 12)
    assert result.measures.error_sq_NLHR.max() < 1e-25
    assert result.num_evicted_NLG.sum() == 0
    assert (result.evicted_at_NLGT == NEVER).all()
    np.testing.assert_allclose(result.measures.cosine_NLHR, 1)
    np.testing.assert_allclose(result.measures.mass_kept_NLHR, 1)
    np.testing.assert_array_equal(result.measures.held_NLGR[0, 0, 0], result.full_R)


def test_the_cosine_of_zero_outputs_is_one_and_of_one_zero_output_is_zero():
    case = make_case(rows=10)
    case.value_LGTD[0] = 0
    case.value_LGTD[1, :, 1:] = 0
    result = run(case, [parse("window:kept=0.3")], 6)
    np.testing.assert_array_equal(result.measures.cosine_NLHR[0, 0], 1)
    np.testing.assert_array_equal(result.measures.cosine_NLHR[0, 1], 0)


def test_a_budget_that_a_sliding_layer_cannot_use_is_flagged_and_a_smaller_one_is_not():
    case = make_case(rows=30, window=8)
    result = run(case, family("knorm", ["0.1", "0.9"]), 20)
    assert result.is_clamped_N.tolist() == [False, True]
    assert result.num_evicted_NLG[1].sum() == 0
    assert (result.num_evicted_NLG[0] == 8 - 2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_recorded_types_are_read_as_float32(dtype):
    case = make_case()
    policies = family("h2o", ["0.3", "0.6"])
    references = [case.reference_in(dtype), case.rounded(dtype).reference_in(torch.float32)]
    results = [run(case, policies, 12, reference) for reference in references]
    np.testing.assert_array_equal(
        results[0].measures.error_sq_NLHR, results[1].measures.error_sq_NLHR
    )
    assert results[0].measures.error_sq_NLHR.dtype == np.float32


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recorded_types_give_what_the_slow_twin_gives(text, dtype):
    case, policies = make_case(rows=36).rounded(dtype), family(text, ["0.3", "0.6", "9tok"])
    result = run(case, policies, 20, case.reference_in(dtype))
    for n, policy in enumerate(policies):
        assert_like_slow(case, policy, n, result, atol=1e-6)


@pytest.mark.parametrize("text", ["full", "h2o", "h2o:every=8", "snapkv:window=4", "tova", "knorm"])
def test_biases_by_distance_are_those_of_the_slow_twin(text):
    """Not among the random cases: they push old keys' weights below what scores can tell apart."""
    case = make_case(rows=40, groups=2, group_size=2, alibi=(0.5, 0.25, 0.125, 0.0625))
    policies = family(text, ["0.3", "9tok"])
    result = run(case, policies, 24)
    for n, policy in enumerate(policies):
        assert_like_slow(case, policy, n, result)


def test_every_preset_has_a_slow_twin_and_runs_beside_it():
    assert {parse(text).name for text in TEXTS} == set(PRESETS.names())


def test_a_reference_serves_families_in_any_order_and_computes_shared_rows_once():
    case = make_case()
    reference = case.reference
    first = reference.full(12, 24)
    for text in ("knorm:kept=0.5", "h2o:kept=0.5", "h2o:kept=0.5,every=5", "knorm:kept=0.5,at=7"):
        shared = run(case, [parse(text)], 12, reference)
        alone = run(case, [parse(text)], 12)
        np.testing.assert_array_equal(shared.measures.error_sq_NLHR, alone.measures.error_sq_NLHR)
    assert reference.full(12, 24) is first


@pytest.mark.parametrize("ends", [{"prompt_end": 24}, {"prompt_end": 25}, {"prompt_end": 0}])
def test_a_sequence_without_a_row_before_or_after_the_point_gives_none(ends):
    case = make_case()
    assert case.num_rows == 24
    policy = parse("knorm:kept=0.5")
    setting = case.setting(1, **ends)
    assert replay([Family((policy,))], case.reference, setting) == [None]


def test_a_single_token_gives_none_for_any_point():
    case = make_case(rows=1)
    setting = replace(case.setting(1), spans=Spans(num_tokens=1))
    assert replay([Family((parse("h2o:kept=0.5"),))], case.reference, setting) == [None]


def test_a_score_that_is_no_number_names_policy_layer_and_head():
    case = make_case()
    case.key_LGTD[1, 1, 5] = np.nan
    with pytest.raises(InputError, match=r"'knorm' .* position 5 in layer 4, KV head 1, after 12"):
        run(case, [parse("knorm:kept=0.5")], 12)


def test_policies_of_two_families_or_without_an_amount_are_refused():
    case = make_case()
    for texts in (["knorm:kept=0.5", "random:kept=0.5"], ["knorm"]):
        with pytest.raises(UsageError, match="one family"):
            run(case, [parse(text) for text in texts], 12)


def test_recorded_rows_are_not_written_to():
    case = make_case()
    before = [a.copy() for a in (case.query_LHTD, case.key_LGTD, case.value_LGTD)]
    run(case, [parse("h2o:kept=0.5")], 12)
    after = (case.query_LHTD, case.key_LGTD, case.value_LGTD)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


PLAIN = [
    "h2o:every=8",
    "h2o:every=8,reduce=max",
    "redundancy:every=9",
    "snapkv:window=4",
    "adakv:window=2",
]


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize(
    "spec", [{}, {"window": 14}, {"sinks": (0.0, 2.0, 1.0, -1.0)}, {"spread": 40.0}]
)
def test_rows_taken_together_measure_what_rows_read_in_order_do(text, spec):
    case = make_case(rows=60, groups=2, group_size=2, **spec)
    draw = np.random.default_rng(1)
    projection_LEX = torch.tensor(draw.normal(size=(2, 5, 4 * case.layer.value_dim)))
    names = ("query_LHTD", "key_LGTD", "value_LGTD")
    tensors = dict(zip(names, case.rows(0, 60), strict=True))
    reference = Reference(
        **tensors,
        layer=case.layer,
        rope=case.rope,
        projection_LEX=projection_LEX,
        influence_LPHRD=case.gradients[..., 35:, :],
        influence_from=35,
    )
    policies = family(text, ["0.2", "0.5", "1.0"])
    decisions = policies[0].schedule.decisions(28, case.spans())
    found = []
    for way in (lambda engine: step(engine, reference, decisions), swept(reference, decisions)):
        engine = make_engine(case, policies)
        engine.absorb(*reference.rows(0, 28))
        found.append(way(engine))
    for name, one, other in zip(Measures._fields, *found, strict=True):
        scale = 1 + np.abs(one.numpy()).max(initial=0, where=~np.isnan(one.numpy()))
        np.testing.assert_allclose(
            other.numpy() / scale, one.numpy() / scale, atol=1e-9, rtol=0, err_msg=name
        )
    assert (~found[0].overlap_NLGR.isnan()).any()
    assert found[0].projected_sq_NLXR.shape[2] == 3
    assert not found[0].influence_NLGPR[..., : 35 - 28].any()
    assert found[0].influence_NLGPR[..., 35 - 28 :].any()


def swept(reference, decisions):
    return lambda engine: sweep([engine], reference, decisions)[0]
