"""Entries evicted, then stored in groups, each once: the engine against a cache that really does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from tests import oracles_transforms as stored
from tests.kv.cases import SEED, TWINS, cases, family, make_case, make_engine, run_family
from tracekit.errors import UsageError
from tracekit.kv.allotment import Allotment
from tracekit.kv.parse import parse
from tracekit.kv.replay import Family, replay
from tracekit.kv.transforms.float8 import Float8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kv.cases import Case
    from tracekit.kv.policy import Policy

TRANSFORMED = [
    "int4:group=3,residual=2",
    "int8:group=2,residual=0",
    "int2:key=token,value=token,group=2,residual=5",
    "int4:key=token,value=channel,group=4,residual=1",
    "fp8",
    "fp8:residual=3",
]
EVICTING = [
    "full",
    "random",
    "random:every=3",
    "streaming:sinks=1",
    "knorm:every=2,recent=2",
    "h2o:every=4",
    "snapkv:window=3,every=5",
]
KEPT = st.sampled_from(["0.1", "0.3", "0.5", "0.9", "1.0", "1tok", "7tok", "60tok"])


def run(
    case: Case, policy: Policy, point: int, *, most: int = 10**6, **more
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read as many rows at once as there is room for, at most ``most``.

    Returns outputs [L, H, R, D], closed entries that each row read [L, G, R] and evicted_at.
    """
    engine = make_engine(case, [policy], **more)
    engine.absorb(*case.rows(0, point))
    stops = [*policy.schedule.decisions(point, case.spans()), case.num_rows]
    outputs, counts = [], []
    for start, end in pairwise(stops):
        engine.decide()
        while start < end:
            stop = min(end, start + engine.room, start + most)
            for output, outcome in engine.read(*case.rows(start, stop)):
                outputs.append(output[0])
                closed_LGK = engine.closed_LGK[..., : outcome.seen_NLGQK.shape[-1]]
                counts.append((outcome.seen_NLGQK[0] & closed_LGK[..., None, :]).sum(-1))
            start = stop
    return (
        torch.cat(outputs, dim=-2).numpy(),
        torch.cat(counts, dim=-1).numpy(),
        engine.evicted_at_NLGK[0].numpy(),
    )


def slow_store(policy: Policy) -> stored.Store:
    """Return the twin of a policy's transform, of those that learn nothing."""
    transform = policy.transform
    if isinstance(transform, Float8):
        return stored.floats()
    return stored.integers(transform.bits, transform.key, transform.value, transform.group)


def make_slow(case: Case, at: int, policy: Policy, *, turned: bool = False) -> stored.SlowStore:
    """Return the twin of layer number ``at``, its entries stored as the policy says."""
    layer, transform = replace(case.layer, index=case.layers[at]), policy.transform
    kind = stored.SlowTurned if turned else stored.SlowStore
    slow = kind(layer, *(array[at] for array in case.arrays))
    if turned:
        slow.rope = case.rope
    if transform is not None:
        slow.stores = [slow_store(policy)] * layer.num_kv_heads
        slow.residual, slow.together = transform.residual, transform.num_together
    return slow


def assert_like_slow(
    case: Case,
    policy: Policy,
    point: int,
    slows: Sequence[stored.SlowStore],
    found: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    allotment: Allotment | None = None,
    atol: float = 1e-9,
) -> None:
    """Compare outputs, closed entries and evictions with the twins of all layers."""
    allotment = allotment or Allotment(case.cache, [policy.kept])
    scores, protection = TWINS[policy.name](policy.scorer), policy.protection
    scale = 1 + np.abs(case.value_LGTD).max()
    for at, slow in enumerate(slows):

        def decide(t: int, at: int = at, slow: stored.SlowStore = slow) -> None:
            budgets = allotment.entries(t, [case.layers[at]])[0, 0].tolist()
            part = protection.recent
            recent = [oracles.entries(part.amount, part.unit, budget) for budget in budgets]
            slow.decide(scores, budgets, protection.sinks, recent)

        due = policy.schedule.decisions(point, case.spans())
        output_HRD, closed_GR = slow.run(point, due, decide)
        never = np.iinfo(np.int32).max
        evicted_at = [
            [gone.get(j, never) for j in range(case.num_rows)] for gone in slow.evicted_at
        ]
        np.testing.assert_array_equal(found[2][at], evicted_at)
        np.testing.assert_array_equal(found[1][at], closed_GR)
        np.testing.assert_allclose(found[0][at] / scale, output_HRD / scale, atol=atol, rtol=0)


def with_kept(text: str, kept: str) -> Policy:
    (policy,) = family(text, [kept])
    return policy


@settings(max_examples=80, deadline=None)
@given(
    cases(min_rows=2),
    st.sampled_from(EVICTING),
    st.sampled_from(TRANSFORMED),
    KEPT,
    st.sampled_from([1, 2, 10**6]),
    st.data(),
)
def test_stored_entries_equal_those_of_the_slow_twin(case, evicting, stored_as, kept, most, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policy = with_kept(f"{evicting}+{stored_as}", kept)
    slows = [make_slow(case, at, policy) for at in range(len(case.layers))]
    assert_like_slow(case, policy, point, slows, run(case, policy, point, most=most))


@pytest.mark.parametrize("stored_as", TRANSFORMED)
@pytest.mark.parametrize("evicting", ["random:every=3", "knorm", "h2o:every=5"])
def test_heads_of_unequal_length_close_their_groups_each_on_its_own(evicting, stored_as):
    case = make_case(rows=40, groups=3)
    policy = with_kept(f"{evicting}+{stored_as}", "0.4")
    shares = tuple(torch.tensor([1.0, 5.0, 2.0]) for _ in case.layers)
    allotment = Allotment(case.cache, [policy.kept], (shares,))
    slows = [make_slow(case, at, policy) for at in range(len(case.layers))]
    found = run(case, policy, 20, allotment=allotment)
    assert_like_slow(case, policy, 20, slows, found, allotment=allotment)
    assert len(np.unique(found[1][0, :, -1])) > 1


@pytest.mark.parametrize("basis", ["head", "layer"])
@pytest.mark.parametrize("evicting", ["full", "random:every=3", "knorm"])
@pytest.mark.parametrize("spec", [{}, {"window": 12}])
def test_a_basis_of_the_rows_before_the_point_serves_all_later_rows(evicting, basis, spec):
    case, point = make_case(rows=40, size=6, groups=3, **spec), 22
    policy = with_kept(f"{evicting}+lowrank:rank=2,residual=4,basis={basis}", "0.5")
    slows = [make_slow(case, at, replace(policy, transform=None)) for at in range(len(case.layers))]
    for slow in slows:
        slow.residual = 4
        heads = [slice(g, g + 1) if basis == "head" else slice(None) for g in range(3)]
        rows = (slow.key_GTD[:, :point], slow.value_GTD[:, :point])
        slow.stores = [
            stored.low_rank(*(array[one] for array in rows), 2, case.rope) for one in heads
        ]
    assert_like_slow(case, policy, point, slows, run(case, policy, point), atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(cases(min_rows=2), st.sampled_from(EVICTING), st.sampled_from(TRANSFORMED), KEPT, st.data())
def test_a_replay_measures_what_the_engine_gives(case, evicting, stored_as, kept, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policy = with_kept(f"{evicting}+{stored_as}", kept)
    result = run_family(case, [policy], point)
    output_LHRD, closed_LGR, evicted_at_LGT = run(case, policy, point, most=1)
    full_LHRD = run(case, parse(f"full:at={point}"), point)[0]
    scale = 1 + np.abs(case.value_LGTD).max()
    error = ((output_LHRD - full_LHRD) ** 2).sum(-1) / scale**2
    np.testing.assert_allclose(result.measures.error_sq_NLHR[0] / scale**2, error, atol=1e-9)
    np.testing.assert_array_equal(result.measures.closed_NLGR[0], closed_LGR)
    np.testing.assert_array_equal(result.evicted_at_NLGT[0], evicted_at_LGT)


def test_the_newest_entries_stay_as_written_and_others_close_by_whole_groups():
    case = make_case(rows=40)
    closed = run(case, parse("int4:group=4,residual=6"), 20)[1]
    expected = [(t - 6) // 4 * 4 for t in range(20, 40)]
    assert (closed == expected).all()


def test_more_rows_than_there_is_room_for_are_refused():
    case = make_case(rows=40)
    engine = make_engine(case, [parse("int4:group=4,residual=6")])
    engine.absorb(*case.rows(0, 20))
    engine.decide()
    assert engine.room == 2
    with pytest.raises(UsageError, match="3 rows are more than the 2"):
        list(engine.read(*case.rows(20, 23)))


def test_kept_amounts_are_replayed_apart_where_entries_are_stored():
    case = make_case(rows=30)
    policies = family("h2o:every=2+int4:group=2,residual=3", ["0.2", "0.6"])
    together = run_family(case, policies, 14)
    for n, policy in enumerate(policies):
        alone = run_family(case, [policy], 14)
        np.testing.assert_array_equal(together.evicted_at_NLGT[[n]], alone.evicted_at_NLGT)
        np.testing.assert_array_equal(
            together.measures.error_sq_NLHR[[n]], alone.measures.error_sq_NLHR
        )


@pytest.mark.parametrize("stored_as", [*TRANSFORMED, "lowrank:rank=1,residual=0"])
def test_recorded_rows_are_not_written_to(stored_as):
    case = make_case()
    reference = case.reference_in(torch.float32)
    before = [array.clone() for array in (reference.key_LGTD, reference.value_LGTD)]
    setting = replace(case.setting(12), seed=SEED)
    replay([Family((with_kept(f"h2o+{stored_as}", "0.5"),))], reference, setting)
    for one, other in zip(before, (reference.key_LGTD, reference.value_LGTD), strict=True):
        assert torch.equal(one, other)


def test_no_decision_looks_ahead_of_what_is_stored():
    case = make_case(rows=40)
    policy = with_kept("h2o:every=3+int4:group=3,residual=2", "0.4")
    one, two = (run(each, policy, 20)[2] for each in (case, case.with_noise_from(30)))
    never = np.iinfo(np.int32).max
    np.testing.assert_array_equal(np.where(one <= 30, one, never), np.where(two <= 30, two, never))
