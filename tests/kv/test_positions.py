"""Keys at their place in the cache, against keys that are turned anew for each row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_transforms as stored
from tests.kv.cases import cases, make_case, run_family
from tests.kv.test_storage import KEPT, assert_like_slow, make_slow, run, with_kept
from tracekit.errors import UsageError
from tracekit.kv.allotment import Allotment
from tracekit.kv.parse import parse
from tracekit.measure.rope import rotate
from tracekit.spec import RopeSpec

if TYPE_CHECKING:
    from tests.kv.cases import Case

HALVES = RopeSpec(kind="default", theta=1e4, inv_freq=(1.0, 0.3), layout="halves")
ROPES = {
    "halves": HALVES,
    "neighbours": replace(HALVES, layout="neighbours"),
    "scaled": replace(HALVES, kind="yarn", attention_scaling=1.3),
    "partial": replace(HALVES, inv_freq=(0.7,)),
    "none": None,
}
SPECS = {
    "plain": {},
    "sliding": {"window": 11},
    "sinks": {"sinks": (0.5, -1.0, 2.0, 0.0)},
    "softcap": {"softcap": 4.0},
}
CACHE = "positions=cache"
EVICTING = [
    "streamingllm",
    "streamingllm:every=4,sinks=1",
    f"random:{CACHE}",
    f"random:every=3,{CACHE}",
    f"knorm:every=2,recent=2,{CACHE}",
    f"full:{CACHE}",
]


def slows_of(case, policy):
    return [make_slow(case, at, policy, turned=True) for at in range(len(case.layers))]


@settings(max_examples=60, deadline=None)
@given(
    cases(min_rows=2),
    st.sampled_from(EVICTING),
    st.sampled_from(["", "+int4:group=3,residual=2", "+fp8"]),
    KEPT,
    st.data(),
)
def test_turned_keys_equal_keys_that_are_turned_anew_for_each_row(
    case, evicting, stored_as, kept, data
):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policy = with_kept(evicting + stored_as, kept)
    assert_like_slow(
        case, policy, point, slows_of(case, policy), run(case, policy, point), atol=1e-7
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "text",
    ["streamingllm", f"knorm:every=2,{CACHE}", f"h2o:every=3,{CACHE}", f"snapkv:window=3,{CACHE}"],
)
def test_turned_keys_equal_their_twin_for_every_layout_of_the_rotary_embedding(text, spec, rope):
    case = replace(make_case(layers=1, rows=26, size=6, **SPECS[spec]), rope=ROPES[rope])
    policy = with_kept(text, "0.4")
    assert_like_slow(case, policy, 14, slows_of(case, policy), run(case, policy, 14))


def dense(case: Case, position_T: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the last row's outputs [L, H, D] over some keys, queries and keys turned to places."""
    query, key, value = (torch.tensor(array) for array in case.arrays)
    place_T = torch.tensor(position_T)
    size = case.layer.group_size
    query = rotate(query[:, :, -1:], place_T[-1:], case.rope)
    key = rotate(key, place_T, case.rope)[:, :, keys].repeat_interleave(size, dim=1)
    weights = (case.layer.scale * query @ key.mT).softmax(-1)
    return (weights @ value[:, :, keys].repeat_interleave(size, dim=1))[:, :, 0].numpy()


def test_streamingllm_by_definition_turns_sinks_and_window_to_positions_from_0_on():
    before = replace(make_case(rows=30, size=6), rope=HALVES)
    position_T = np.arange(30)
    query, key = (
        rotate(torch.tensor(array), torch.tensor(position_T), HALVES).numpy()
        for array in before.arrays[:2]
    )
    recorded = replace(before, query_LHTD=query, key_LGTD=key)
    found = run(recorded, parse("streamingllm:kept=10tok,sinks=3"), 20)[0][..., -1, :]
    # The last row is position 29; at its decision 10 of 29 entries stayed, then its own came.
    kept = np.array([0, 1, 2, *range(22, 30)])
    place_T = np.zeros(30, dtype=int)
    place_T[kept] = range(11)
    np.testing.assert_allclose(found, dense(before, place_T, kept), atol=1e-12)
    original = run(recorded, parse("streaming:kept=10tok,sinks=3"), 20)[0][..., -1, :]
    np.testing.assert_allclose(original, dense(before, position_T, kept), atol=1e-12)
    assert np.abs(found - original).max() > 1e-3


@pytest.mark.parametrize("text", ["streamingllm", "streaming", "lowrank:rank=2"])
def test_moving_all_positions_changes_nothing(text):
    case = replace(make_case(rows=30, size=6), rope=HALVES)
    query, key = (rotate(torch.tensor(array), 1000, HALVES).numpy() for array in case.arrays[:2])
    moved = replace(case, query_LHTD=query, key_LGTD=key)
    one, two = (run(each, with_kept(text, "0.4"), 20)[0] for each in (case, moved))
    np.testing.assert_allclose(one, two, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", ["full:at=prompt", "h2o:every=3,kept=1.0", "streaming:kept=1.0"])
def test_where_nothing_is_evicted_keys_keep_their_bits(text, dtype, rope, spec):
    case = replace(make_case(rows=30, size=6, **SPECS[spec]), rope=ROPES[rope])
    errors = [
        run_family(case, [parse(one)], 16, case.reference_in(dtype)).measures.error_sq_NLHR
        for one in (text, f"{text},{CACHE}")
    ]
    np.testing.assert_array_equal(*errors)


@pytest.mark.parametrize("rope", [replace(HALVES, layout=None), replace(HALVES, kind="longrope")])
def test_a_rotary_embedding_that_cannot_be_turned_is_refused_in_a_sentence(rope):
    case = replace(make_case(rows=20, size=6), rope=rope)
    with pytest.raises(UsageError, match="rotary embedding"):
        run_family(case, [parse("streamingllm:kept=0.5")], 12)


def test_layers_without_a_rotary_embedding_have_no_positions_to_change():
    case = replace(make_case(rows=30, size=6), rope=None)
    one, two = (
        run_family(case, [parse(f"{name}:kept=0.4")], 16).measures
        for name in ("streaming", "streamingllm")
    )
    np.testing.assert_array_equal(one.error_sq_NLHR, two.error_sq_NLHR)


def test_heads_with_unequal_budgets_are_refused():
    case = make_case(rows=30)
    shares = tuple(torch.tensor([1.0, 3.0]) for _ in case.layers)
    policy = parse(f"knorm:kept=0.4,{CACHE}")
    with pytest.raises(UsageError, match="heads of one length"):
        run(case, policy, 16, allotment=Allotment(case.cache, [policy.kept], (shares,)))


def test_a_place_is_the_number_of_entries_before():
    case = replace(make_case(rows=12, groups=1, group_size=1, layers=1, size=6), rope=HALVES)
    slow = make_slow(case, 0, parse("streamingllm:kept=0.5"), turned=True)
    alone = slow.attention(0, 11, {2, 11})
    next_to_it = stored.turned(case.key_LGTD[0, 0, 2], 8, HALVES)
    dots = case.query_LHTD[0, 0, 11] @ np.stack([next_to_it, case.key_LGTD[0, 0, 11]]).T
    true = np.exp(case.layer.scale * dots)
    np.testing.assert_allclose([alone[2], alone[11]], true / true.sum())


def test_biases_by_distance_cannot_be_turned():
    case = make_case(alibi=(0.5, 0.25, 0.125, 0.0625))
    with pytest.raises(UsageError, match="ALiBi"):
        run_family(case, [parse("streamingllm:kept=0.5")], 12)
