"""Scores made of keys, values and queries, where they are known beforehand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kv.cases import SEED
from tracekit.errors import UsageError
from tracekit.kv.parse import parse
from tracekit.kv.view import View
from tracekit.measure.rope import rotate
from tracekit.spec import LayerSpec, RopeSpec

ROPES = {
    "none": None,
    "halves": RopeSpec(kind="default", theta=1e4, inv_freq=(1.0, 0.3), layout="halves"),
    "partial": RopeSpec(kind="default", theta=1e4, inv_freq=(0.7,), layout="neighbours"),
    "scaled": RopeSpec(
        kind="yarn", theta=1e4, inv_freq=(1.0, 0.1), attention_scaling=1.4, layout="neighbours"
    ),
}


def rows(*shape, seed=0):
    """Return normal numbers, float64."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def make_view(key_KD=None, value_KD=None, query_HKD=None, *, rope=None, held=None, **spec):
    """Return the view of one layer with one KV head; what is not given is normal numbers."""
    given = key_KD if key_KD is not None else value_KD
    num_keys, size = (12, 4) if given is None else given.shape
    num_heads = 2 if query_HKD is None else len(query_HKD)
    key_KD = rows(num_keys, size, seed=1) if key_KD is None else key_KD
    value_KD = rows(num_keys, size, seed=2) if value_KD is None else value_KD
    query_HKD = rows(num_heads, num_keys, size, seed=3) if query_HKD is None else query_HKD
    shape = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": size, "value_dim": size}
    is_held_K = torch.ones(num_keys, dtype=torch.bool)
    if held is not None:
        is_held_K[:] = False
        is_held_K[held] = True
    return View(
        layer=LayerSpec(index=0, kind="full", **shape, **{"scale": size**-0.5, **spec}),
        layers=(0,),
        seed=SEED,
        held_NLGK=is_held_K[None, None, None],
        stored=key_KD[None, None],
        keys=key_KD[None, None],
        values=value_KD[None, None],
        queries=query_HKD[None],
        last_queries=query_HKD[None, :, -1:],
        rope=rope,
    )


def as_recorded(row_TD, rope):
    """Return rows turned to their positions, and scaled in the numbers that are turned."""
    if rope is None:
        return row_TD
    is_turned_D = torch.arange(row_TD.shape[-1]) < 2 * len(rope.inv_freq)
    scale_D = torch.where(is_turned_D, rope.attention_scaling, 1.0)
    return rotate(row_TD * scale_D, torch.arange(row_TD.shape[-2]), rope)


def scores(text, view):
    """Return the scores [K] of a policy's scorer."""
    return parse(text).scorer.score(view)[0, 0, 0]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def assert_close(found, true):
    torch.testing.assert_close(
        found.double(), torch.as_tensor(true, dtype=torch.float64), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize(
    "text", ["keydiff", "cur:window=3", "lagkv:sinks=0,lag=2", "leverage", "noncausal:chunk=3"]
)
def test_evicted_keys_have_no_part_in_the_score_of_those_that_are_left(text):
    left = torch.tensor([0, 2, 3, 5, 6, 8, 11])
    whole, part = make_view(held=left), make_view()
    part = replace(
        part,
        held_NLGK=part.held_NLGK[..., left],
        keys=part.keys[:, :, left],
        values=part.values[:, :, left],
        queries=part.queries[:, :, left],
    )
    assert_close(scores(text, whole)[left], scores(text, part))


def test_keydiff_prefers_the_key_that_points_the_other_way_whatever_its_length():
    view = make_view(tensor([1, 0], [9, 0], [0, 2], [-5, 0.0], [1, 0]))
    anchor = np.array([2, 1]) / np.sqrt(5)
    assert_close(
        scores("keydiff", view), np.round([-anchor[0]] * 2 + [-anchor[1], anchor[0], -anchor[0]], 7)
    )


def test_keydiff_has_no_preference_where_directions_cancel_or_keys_are_zero():
    for keys in (tensor([0.6, 0.8], [-3, -4]), tensor([0, 0], [0, 0.0])):
        assert_close(scores("keydiff", make_view(keys)), [0, 0])


def test_lagkv_ranks_a_partition_by_its_spread_in_the_range_of_the_next():
    key = tensor([0, 0], [0, 8], [5, 6], [0, 0], [1, 2], [0, 0], [3, 3])
    # In the ranges of the partition that follows: (0, 4), (5, 3); (0, 0), (1/3, 2/3); no more.
    found = scores("lagkv:sinks=1,lag=2", make_view(key, torch.zeros_like(key)))
    assert_close(found, [1, 0.5, 0, 0, 0.5, 1, 1])


def test_lagkv_compares_nothing_before_there_are_two_partitions():
    assert (scores("lagkv:sinks=3,lag=5", make_view()) == 1).all()
    assert (scores("lagkv:sinks=2,lag=5", make_view()) < 1).any()


def test_lagkv_ranks_by_position_where_the_next_partition_is_constant():
    key = torch.cat([rows(4, 3), torch.ones(4, 3)])
    found = scores("lagkv:sinks=0,lag=4", make_view(key, key))
    assert_close(found, [0, 0.25, 0.5, 0.75, 1, 1, 1, 1])


def test_cur_multiplies_shares_of_a_block_and_the_last_key_alone_has_all_of_its_own():
    key, value = tensor([1, 0], [0, 2], [5, 5]), tensor([3, 0], [0, 1], [0.1, 0])
    found = scores("cur:window=2", make_view(key, value))
    assert_close(found, tensor(1 / 5 * 9 / 10, 4 / 5 * 1 / 10, 1))
    assert_close(scores("cur", make_view(key, torch.zeros_like(value))), [0, 0, 0])


@pytest.mark.parametrize("name", ROPES)
def test_expected_attention_of_queries_that_never_change_is_that_of_the_next_one(name):
    rope, key, query_HD = ROPES[name], rows(9, 4), 2 * rows(3, 4, seed=5)
    query_HTD = as_recorded(query_HD[:, None].expand(-1, 10, -1), rope)
    view = make_view(key, query_HKD=query_HTD[:, :9], rope=rope)
    found = scores("expected:sinks=1,future=1", view)
    weights = (key[1:] @ query_HTD[:, 9].T / 2).softmax(0).mean(1)
    assert_close(found[1:], weights * view.value_LGKD[0, 0, 1:].norm(dim=-1))
    assert found[0] == torch.inf


def test_expected_attention_gains_from_the_spread_of_queries():
    key = tensor([1, 0], [0, 1], [-3, 0])
    query = tensor([2, 0], [-2, 0], [0, 0])[None]
    found = scores("expected:sinks=0", make_view(key, torch.ones_like(key), query, scale=0.5))
    spread = 8 / 3  # of the first channel; the logit is scale^2 / 2 * spread * k^2
    weights = torch.softmax(0.5**2 / 2 * spread * tensor(1, 0, 9), dim=0)
    assert_close(found, weights * 2**0.5)


def test_expected_attention_refuses_a_rope_that_cannot_be_turned():
    rope = RopeSpec(kind="dynamic", theta=1e4, inv_freq=(1.0, 0.3), layout="halves")
    for text in ("expected", "leverage"):
        with pytest.raises(UsageError, match="cannot be turned"):
            scores(text, make_view(rope=rope))


@pytest.mark.parametrize("spec", [{}, {"sinks": (0.5, -1.0)}, {"softcap": 3.0}])
def test_caote_is_the_error_of_the_output_if_one_key_leaves(spec):
    view = make_view(**spec)
    weights_HK = view.last_attention_NLHQK[0, 0, :, 0]
    value_KD = view.value_LGKD[0, 0]
    gap_HK = torch.cdist((weights_HK @ value_KD)[:, None], value_KD[None].expand(2, -1, -1))[:, 0]
    true_HK = weights_HK / (1 - weights_HK) * gap_HK
    assert_close(scores("caote", view), true_HK.mean(0))


@pytest.mark.parametrize("logit", [5.0, 30.0, 1e4])
def test_caote_knows_what_the_key_that_takes_nearly_all_attention_is_worth(logit):
    key, query = tensor([1, 0], [0, 0], [0, 0]), tensor([0, 0], [0, 0], [logit, 0])[None]
    value = tensor([0, 0], [3, 0], [3, 8])
    found = scores("caote", make_view(key, value, query, scale=1.0))
    others = np.exp(-logit) / (1 + 2 * np.exp(-logit))
    assert_close(found[0], (1 - 2 * others) * 5)
    assert (found[1:] < 0.1).all()


def test_caote_has_no_preference_among_equal_values():
    value = tensor([0.1, 0.7]).expand(6, 2)
    assert (scores("caote", make_view(rows(6, 2), value)) == 0).all()


def test_vatp_weighs_what_a_key_received_by_its_value():
    view = make_view(value_KD=tensor([1, -2], [0, 0], [0.5, 0]))
    scorer = parse("vatp").scorer
    view = replace(
        view, accumulated={scorer.needs.accumulated[0]: tensor(1, 9, 2)[None, None, None]}
    )
    assert_close(scorer.score(view)[0, 0, 0], [3, 0, 1])


def test_rkv_prefers_the_newest_of_keys_that_are_alike():
    key = tensor([1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1])
    view = make_view(key, query_HKD=torch.zeros(1, 5, 3, dtype=torch.float64))
    found = scores("rkv:window=1", view)
    # Attention is even. The first two find the third as their newest like, the third the second.
    redundancy = torch.softmax(tensor(2, 1, 0, 0, 0) / 5, dim=0)
    assert_close(found[:4], 0.1 / 4 - 0.9 * redundancy[:4])
    assert found[4] == torch.inf


def test_leverages_add_up_to_the_number_of_independent_directions():
    view = make_view(rows(40, 4))
    found = scores("leverage:ridge=1e-9", view)
    assert_close(found.sum(), 4)
    assert (found > 0).all()
    assert (found < 1).all()


def test_a_key_that_nothing_can_be_combined_into_has_all_the_leverage_it_can_have():
    key = torch.zeros(10, 3, dtype=torch.float64)
    key[:, 0] = rows(10)
    key[7, 1] = 5
    found = scores("leverage:ridge=1e-12", make_view(key))
    assert_close(found[7], 1 - 1 / 10)  # all but its own part in the mean
    assert found.argmax() == 7


@pytest.mark.parametrize("name", ["halves", "partial", "scaled"])
def test_leverage_is_that_of_keys_before_the_rotary_embedding(name):
    rope, key = ROPES[name], rows(12, 4)
    written = as_recorded(key, rope)
    true = scores("leverage", make_view(key))
    assert_close(scores("leverage", make_view(written, rope=rope)), true)
    assert not torch.allclose(scores("leverage", make_view(written)), true)


def test_a_sketch_as_wide_as_a_key_changes_nothing_and_a_narrow_one_does():
    view = make_view(rows(20, 4))
    exact, same, narrow = (
        scores(f"leverage:ridge=1e-12,sketch={width}", view) for width in (0, 4, 2)
    )
    assert_close(same, exact)
    assert_close(narrow.sum(), 2)


def test_a_sketch_follows_seed_and_layer():
    view = make_view()
    found = [
        scores("leverage:sketch=2", one)
        for one in (view, view, replace(view, seed=8), replace(view, layers=(1,)))
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    assert not torch.allclose(found[0], found[3])


def test_keys_that_are_not_finite_get_no_leverage_and_no_exception():
    key = rows(6, 4)
    key[2, 1] = torch.nan
    assert scores("leverage", make_view(key)).isnan().all()


def test_a_chunk_of_one_receives_itself_so_that_norms_are_averaged_over_neighbours():
    view = make_view(value_KD=tensor([3, 4], [0, 1], [0, 0], [6, 8]))
    assert_close(scores("noncausal:chunk=1", view), tensor(6, 6, 11, 10) / 3)


@pytest.mark.parametrize("chunk", [4, 5, 12, 256])
def test_a_chunk_receives_what_its_own_queries_give_without_a_causal_mask(chunk):
    key, size = rows(12, 4), min(chunk, 12)
    view = make_view(key, torch.ones_like(key) / 2)
    scorer = parse(f"noncausal:chunk={chunk}").scorer
    counted = torch.zeros(1, 1, 1, 12, dtype=torch.bool)
    counted[..., :size] = True
    found = scorer.among(view, counted)[0, 0, 0]
    query, received = view.query_LHKD[0, :, :size], torch.zeros(size, dtype=torch.float64)
    for head in query:
        received += (head @ key[:size].T).softmax(-1).sum(0) / 2
    padded = torch.nn.functional.pad(received, (1, 1))
    assert_close(found[:size], (padded[:-2] + padded[1:-1] + padded[2:]) / 3)
    assert (found[size:] == 0).all()


def test_compactor_is_either_of_its_halves_where_the_other_has_no_weight():
    view = make_view(rows(30, 4))
    inner = slice(8, 26)
    alone = replace(view, held_NLGK=torch.zeros_like(view.held_NLGK))
    alone.held_NLGK[..., inner] = True
    for blend, text in (("0", "noncausal"), ("1e6", "leverage")):
        found = scores(f"compactor:blend={blend}", view)
        assert torch.equal(found[inner].argsort(), scores(text, alone)[inner].argsort())
        assert (found[:8] == torch.inf).all()
        assert (found[26:] == torch.inf).all()


def test_compactor_adds_z_scores():
    view = make_view(rows(30, 4))
    parts = [scores(f"compactor:blend={blend}", view)[8:26] for blend in (0, 1, 3)]
    assert abs(float(parts[0].mean())) < 1e-6
    assert abs(float(parts[0].std()) - 1) < 1e-6
    torch.testing.assert_close(parts[2] - parts[0], 3 * (parts[1] - parts[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["lagkv", "expected", "compactor"])
def test_the_positions_that_stay_are_those_that_the_score_leaves_out(name):
    policy = parse(f"{name}:sinks=3")
    assert policy.scorer.sinks == policy.protection.sinks == 3


@pytest.mark.parametrize(
    "text",
    [
        "lagkv:lag=0",
        "lagkv:sinks=-1",
        "cur:window=0",
        "expected:future=0",
        "expected:epsilon=-1",
        "caote:window=0",
        "rkv:window=0",
        "rkv:kernel=4",
        "rkv:mix=2",
        "rkv:threshold=-1",
        "leverage:sketch=-1",
        "leverage:ridge=0",
        "noncausal:chunk=0",
        "compactor:chunk=0",
        "compactor:ridge=0",
        "compactor:newest=-1",
    ],
)
def test_a_parameter_out_of_range_is_refused(text):
    with pytest.raises(UsageError):
        parse(text)
